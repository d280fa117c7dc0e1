"""Faults of child processes, of the end of a run and of placement."""

from benchmarks.process_faults.fault import Fault

_ENDINGS = ("tests/e2e/test_faults.py",)
_WAITING = ("tests/ray/test_waiting.py",)

FAULTS: dict[str, Fault] = {
    "the supervisor leaves what the command has started": Fault(
        "slime/processes/supervisor.py",
        "        self.kill_tree()\n        return self.status",
        "        return self.status",
        ("tests/processes/test_child.py",),
        "test_descendants_that_left_the_process_group",
    ),
    "the command outlives a supervisor that was killed": Fault(
        "slime/processes/supervisor.py",
        "        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)\n",
        "",
        ("tests/processes/test_child.py",),
        "test_the_command_dies_when_the_supervisor_is_killed",
    ),
    "the reaper does nothing": Fault(
        "slime/processes/reaper.py",
        "        reap(left)\n        sweep(seen | left.keys())",
        "        pass",
        ("tests/processes/test_reaper.py",),
        "test_nothing_outlives_a_killed_driver",
    ),
    "SIGTERM waits for the main thread": Fault(
        "slime/processes/termination.py",
        "    threading.Thread(target=_watch",
        "    0 and threading.Thread(target=_watch",
        ("tests/processes/test_termination.py",),
        "test_a_main_thread_that_runs_no_handler_is_ended",
    ),
    "SIGTERM ends a run without its last line": Fault(
        "slime/ray/session.py",
        "    if was_terminated():\n        leave()\n    os._exit(status)",
        "    os._exit(status)",
        _ENDINGS,
        "test_sigterm_stops_what_a_run_has_in_the_cluster_of_others",
    ),
    "the last line does not say why a run failed": Fault(
        "slime/ray/session.py",
        '        traceback.print_exc()\n        print(f"\\nerror:',
        '        traceback.print_exc()\n        0 and print(f"\\nerror:',
        _ENDINGS,
        "test_a_failing_reward_function",
    ),
    "an actor that is stopped is not noticed": Fault(
        "slime/ray/process_watch.py",
        "return [pid for pid in pids if is_stopped(pid)]",
        "return [pid for pid in pids if is_stopped(pid) and pid < 0]",
        ("tests/ray/test_process_watch.py",),
        "test_a_stopped_rank_ends_the_wait_by_name",
    ),
    "a failed rank is told when all have answered": Fault(
        "slime/ray/waiting.py",
        "        for ref in done:  # none when the time has run out",
        "        for ref in () if pending else refs:",
        _WAITING,
        "test_a_failed_rank_is_reported_while_an_earlier_one_hangs",
    ),
    "engines get the trainer's GPUs": Fault(
        "slime/ray/placement_group.py",
        "rollout=slots.slice(layout.rollout_offset, layout.rollout_offset + layout.rollout)",
        "rollout=slots.slice(0, layout.rollout)",
        ("tests/ray/test_placement_on_nodes.py",),
        "test_trainer_and_engines_get_disjoint_gpus",
    ),
    "a process that died is not told by its rank": Fault(
        "slime/ray/waiting.py",
        "    except ray.exceptions.RayActorError as error:",
        "    except ray.exceptions.GetTimeoutError as error:",
        _WAITING,
        "test_a_killed_process_is_named_with_its_rank",
    ),
    "the answers of ranks are in another order than their calls": Fault(
        "slime/ray/waiting.py",
        "    return ray.get(list(refs))",
        "    return ray.get(list(refs)[::-1])",
        _WAITING,
        "test_results_come_in_the_order_of_the_calls",
    ),
    "an actor that went on counts as stopped": Fault(
        "slime/processes/stopped.py",
        "self._last_look, self._since = now, {}",
        "self._last_look, self._since = now, dict(before)",
        ("tests/ray/test_process_watch.py",),
        "test_a_rank_that_goes_on_is_forgiven",
    ),
    "the cause of a failure is that of Ray's wrapping": Fault(
        "slime/ray/ending.py",
        "        error = inner\n",
        "        break\n",
        ("tests/ray/test_session.py",),
        "test_the_cause_of_a_remote_failure",
    ),
    "the parts of an engine on two nodes do not know where to meet": Fault(
        "slime/ray/spawned_engines.py",
        'options = {"meeting_point": actors[0].meeting_point.remote()} if part else {}',
        "options: dict[str, Any] = {}",
        ("tests/ray/test_placement_on_nodes.py",),
        "test_an_engine_over_two_nodes",
    ),
}
