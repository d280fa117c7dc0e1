"""Every call that may block has a deadline: its own, that of a block around it, or one that is named here."""

from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from tests.blocking_calls import blocking_calls

ROOT = Path(__file__).parents[1]

# A process or thread that has nothing to do waits for work: whoever has it ends it, by a message, a closed
# pipe or a signal. Nobody waits for such a wait.
IDLE = {
    "agent/jail/serve.py: main: os.waitpid": "the process around the jail, which its sandbox kills",
    "agent/sandbox/ports.py: _accept: free.acquire": "a task that the sandbox cancels",
    "agent/sandbox/engine.py: end: self._flood.wait": "a task that is cancelled beside its deadline",
    "backends/embedded_engine/engine.py: _take_incoming: self._wakeup.wait": "woken by close",
    "backends/embedded_engine/grammar/worker.py: main: sys.stdin.readline": "its engine closes the pipe",
    "cli/chaos.py: _run_twin: twin.wait": "the life of the run",
    "environments/verifiers_host.py: serve: reader.readline": "whoever plays with it closes the pipe",
    "rollout/environment_hosts.py: _work: self._jobs.get": "its episode ends it, or it is a daemon",
    "processes/reaper.py: sweep_after: select.select": "the life of its process",
    "rollout/sleep_rollout.py: sleep: threading.Event().wait": "what it is for",
    "router/asgi.py: receive: asyncio.Event().wait": "cancelled with its request",
    "router/processes.py: run: self._reader.readline": "ends with the other process",
    "router/processes.py: run: stop.wait": "until a signal",
    "router/processes.py: _run_child: stop.wait": "until a signal",
    "router/router.py: _serve: stop.wait": "until a signal",
    "router/serving.py: until_first: asyncio.wait": "until a signal",
}
# The other end has been killed, or has said that it ends: the kernel answers.
KILLED = {
    "agent/jail/commands.py: run_command: process.wait": "its output has ended or its group was killed",
    "agent/jail/descendants.py: _bury: os.waitpid": "WNOHANG, or all have been killed",
    "agent/sandbox/local.py: _wait_for_end: process.wait": "after SIGKILL",
    "arguments/validate/tokenizer_process.py: tokenizer_process: process.communicate": "after SIGKILL",
    "backends/embedded_engine/grammar/compiler.py: close: self._worker.wait": "after SIGKILL",
    "backends/embedded_engine/grammar/compiler.py: _ask: self._worker.wait": "it has ended",
    "backends/megatron_utils/checkpoint_processes.py: _unanswered: process.join": "it has ended",
    "chaos/supervised.py: end: self._process.wait": "after SIGKILL",
    "processes/child.py: terminate: self._supervisor.wait": "after SIGKILL",
    "processes/forked.py: close: self._process.wait": "after SIGKILL",
    "processes/termination.py: leave: _leaving.acquire": "the process ends by os._exit meanwhile",
    "rollout/rm_hub/grading_pool.py: stop: process.wait": "after SIGKILL",
    "rollout/verifiers_episodes.py: kill: self._process.wait": "after SIGKILL",
}
# What is asked for is there: a wait with a deadline came before, or nothing is waited for.
DONE = {
    "agent/sandbox/engine.py: _code: self._work.result": "after done()",
    "backends/embedded_engine/scheduler.py: _append: sequence.constraint.accept": "a grammar's",
    "backends/megatron_utils/checkpoint_processes.py: _read: receiver.recv": "_waited_for",
    "backends/fsdp_utils/checkpoint.py: poll: future.exception": "after done()",
    "backends/megatron_utils/server/app.py: _update: done.result": "in its done callback",
    "observability/trace_utils.py: trace_span: _open_spans.get": "a context variable",
    "observability/trace_utils.py: _innermost: _open_spans.get": "a context variable",
    "processes/fork_server.py: serve: self._listener.accept": "after select",
    "processes/forked.py: _next_answer: self._socket.recv": "after select",
    "ray/ending.py: leaving_within: sys.exception": "the exception that is handled",
    "backends/embedded_engine/engine.py: run: writer.get": "a context variable",
    "ray/process_watch.py: _learn: ray.get": "after ray.wait",
    "ray/process_watch.py: _answers: ray.get": "after ray.wait",
    "ray/rollout_manager.py: _await: future.result": "after done()",
    "ray/waiting.py: wait_all: ray.get": "after ray.wait",
    "ray/waiting.py: _raise_failure: ray.get": "after ray.wait",
    "ray/waiting.py: _raise_death: ray.get": "after ray.wait",
    "rollout/async_worker.py: _end: task.exception": "in its done callback",
    "rollout/rejection_sampling.py: sample_by_rejection: accept": "a filter",
    "rollout/sample_hooks.py: _apply: _current_rollout_id.get": "a context variable",
    "utils/http_utils.py: asked_adapter: _adapter.get": "a context variable",
    "rollout/sglang_rollout.py: fill: task.result": "a task that has ended",
    "rollout/sglang_rollout.py: abort: task.result": "a task that has ended",
    "router/halves.py: answered: decode.result": "after asyncio.wait",
    "router/halves.py: answered: prefill.result": "after asyncio.wait",
    "router/halves.py: _head_of: task.result": "a task that has ended",
    "router/upstream.py: finish_half: head.exception": "a task that has ended",
    "router/upstream.py: finish_half: head.result": "a task that has ended",
    "router/serving.py: until_first: task.result": "a task that has ended",
    "training/conversion.py: split_train_data_by_dp: select": "rows of a batch",
    "weight_sync/floor.py: loopback_speed: server.accept": "the connection was made on the line before",
    "weight_sync/transports/engine_group.py: failure_of: one.exception": "after done()",
    "weight_sync/transports/engine_group.py: join_engines: joined.result": "after wait",
}
# The socket, the group or what runs at the other end has the limit.
OTHER_END = {
    "backends/embedded_engine/__main__.py: main: dist.init_process_group": "a group of one",
    "backends/embedded_engine/grammar/compiler.py: _ask: self._worker.stdout.readline": "its own limit",
    "backends/embedded_engine/weight_groups.py: _meet: init_process_group": "its timeout",
    "backends/embedded_engine/weight_groups.py: _meet: member.result": "its timeout",
    "backends/embedded_engine/weight_groups.py: receive: works.pop(0).wait": "the group's",
    "backends/fsdp_utils/initialize.py: init: init_device_mesh": "bound_collectives",
    "backends/fsdp_utils/initialize.py: _parallel_context: init_device_mesh": "bound_collectives",
    "backends/megatron_utils/convert.py: _model: dist.init_process_group": "a group of one",
    "backends/megatron_utils/hf_weights.py: _wait_all: work.wait": "bound_collectives",
    "backends/megatron_utils/model_on_paper.py: _first_of: dist.init_process_group": "no peers",
    "backends/megatron_utils/moment_storage.py: step: wait": "a copy to the host",
    "backends/megatron_utils/moment_storage.py: step: self._to_device.join": "copies to the device",
    "backends/megatron_utils/server/model.py: __init__: dist.init_process_group": "of one",
    "processes/fork_server.py: _say: client.sendall": "settimeout",
    "processes/forked.py: status_of: answers.readline": "settimeout",
    "processes/forked.py: receive_request: client.recv": "settimeout",
    "processes/forked.py: _send_request: client.sendall": "the server reads within 5 s, or closes",
    "weight_sync/floor.py: send: sending.join": "its socket has one of 10 s",
    "weight_sync/floor.py: _receive: receiver.recv_into": "settimeout",
    "weight_sync/shards/exchange.py: run: work.wait": "the group's",
    "weight_sync/transports/engine_group.py: join: init_process_group": "its timeout",
    "weight_sync/transports/broadcast.py: _broadcast: works[0].wait": "the group's",
    "backends/embedded_engine/rank_messages.py: receive: works.pop(0).wait": "the group's",
    "backends/embedded_engine/weight_groups.py: begin_receiving: ranks[one.rank].recv": "does not wait",
    "weight_sync/transports/shard_group.py: _give_up: wait": "5 s",
    "weight_sync/transports/shard_group.py: _await_all: works[0].wait": "the group's",
    "weight_sync/transports/engine_group.py: _abandon: work.wait": "the group's",
    "weight_sync/transports/broadcast.py: _settle: under_way.result": "the clients' timeout, and the group's",
    "weight_sync/transports/session.py: each: future.result": "the clients' timeout",
    "weight_sync/transports/session.py: _require_flushed: flushed.result": "the clients' timeout",
    "weight_sync/transports/handle.py: _settle: self._under_way[1].result": "the client's timeout",
    "ray/engine_watch.py: stop: self._thread.join": "a look has the clients' timeout",
    "ray/engine_watch.py: look: wait": "the clients' timeout",
    "ray/engine_watch.py: probe: wait": "the clients' timeout",
    "rollout/rm_hub/grading_pool.py: call: self._idle.get": "each call before it has its limit",
}
# Whoever calls has the deadline, and ends this wait with it.
CALLER = {
    "agent/sandbox/workspaces.py: remove_tree: subprocess.run": "a rollout's",
    "backends/embedded_engine/http/running.py: run_to_end: asyncio.wait": "ends when its client has gone",
    "backends/embedded_engine/http/running.py: run_streaming: wakeup.wait": "ends when its client has gone",
    "backends/fsdp_utils/checkpoint.py: finish: future.result": "--train-timeout",
    "backends/megatron_utils/background_save.py: is_current_async_call_done: self._watcher.join": (
        "--train-timeout; a process that is killed or stopped ends it before"
    ),
    "backends/megatron_utils/server/launch.py: end: thread.join": "a test, or the end of the process",
    "cli/api.py: _run: process.wait": "the run's own deadlines",
    "chaos/faults.py: _strike_for: subprocess.run": "the start of a Python",
    "processes/reaper.py: remove_after: select.select": "the end of the run",
    "processes/memory_directory.py: _start_reaper: subprocess.run": "the start of a Python",
    "processes/reaper.py: start_memory_reaper: subprocess.run": "the start of the actor",
    "ray/asynchronous.py: finish: self._pending.result": "--rollout-timeout, in RolloutGroup._finish",
    "ray/asynchronous.py: batch: self._pending.result": "it is there",
    "ray/rollout_group.py: generate: self.async_generate(rollout_id).result": "as above",
    "ray/train_worker.py: train: ray.get": "--train-timeout",
    "rollout/async_worker.py: collect: self._arrived.wait": "--rollout-timeout",
    "rollout/sglang_rollout.py: fill: self._arrived.wait": "--rollout-timeout",
    "router/asgi.py: _unless_disconnected: asyncio.wait": "ends when its client has gone",
    "router/halves.py: answered: asyncio.wait": "--slime-router-timeout, and ends when its client has gone",
    "router/upstream.py: ask: self._free.acquire": "ends when its client has gone",
    "router/upstream.py: finish_half: asyncio.wait": "a task that was cancelled",
    "utils/async_utils.py: run: future.result": "the coroutine's own",
    "utils/async_utils.py: __aenter__: self.acquire": "a rollout's",
    "utils/external_utils/command_utils.py: model_args: subprocess.run": "prints variables",
    "utils/external_utils/command_utils.py: exec_command: subprocess.run": "a launch script's",
    "utils/external_utils/command_utils.py: _run: subprocess.run": "a launch script's",
    "utils/misc.py: exec_command: subprocess.run": "a launch script's",
    "utils/weight_clock.py: settled: settled.wait": "a rollout's; an update has its own deadline",
}
NAMED = IDLE | KILLED | DONE | OTHER_END | CALLER


@cache
def _found():
    """The lines of each call without a deadline, by what it is called here."""
    lines = defaultdict(list)
    for path in sorted((ROOT / "slime").rglob("*.py")):
        for call in blocking_calls(path.read_text()):
            lines[f"{path.relative_to(ROOT / 'slime')}: {call.function}: {call.callee}"].append(call.line)
    return lines


def test_every_wait_has_a_deadline_or_is_named():
    unknown = [f"{name} (lines {lines})" for name, lines in _found().items() if name not in NAMED]
    assert not unknown, "without a deadline:\n" + "\n".join(unknown)


def test_what_is_named_is_there():
    assert not NAMED.keys() - _found().keys()


@pytest.mark.parametrize(
    "line",
    [
        "event.wait()",
        "thread.join()",
        "future.result(timeout=None)",
        "jobs.get()",
        "lock.acquire()",
        "ray.get(ref)",
        "ray.wait([ref])",
        "process.communicate()",
        "subprocess.run(['ls'], check=True)",
        "select.select([one], [], [])",
        "select.select([one], [], [], None)",
        "os.waitpid(pid, 0)",
        "fcntl.flock(file, fcntl.LOCK_EX)",
        "dist.barrier()",
        "dist.new_group(ranks)",
        "urllib.request.urlopen(url)",
        "requests.get(url)",
        "connection.recv(1)",
    ],
)
def test_a_wait_without_a_deadline_is_found(line):
    source = f"class A:\n    async def f(self):\n        with open(path):\n            {line}\n"
    assert [(call.function, call.line) for call in blocking_calls(source)] == [("f", 4)]


@pytest.mark.parametrize(
    "line",
    [
        "event.wait(3)",
        "thread.join(timeout=grace)",
        "future.result(limit_s)",
        "jobs.get(timeout=1)",
        "settings.get('name')",
        "', '.join(words)",
        "ray.get(ref, timeout=3)",
        "ray.wait([ref], timeout=0)",
        "subprocess.run(['ls'], timeout=3)",
        "select.select([one], [], [], left)",
        "selector.select(left)",
        "os.waitpid(pid, os.WNOHANG)",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "dist.new_group(ranks, timeout=limit)",
        "await asyncio.wait_for(event.wait(), 3)",
        "async with asyncio.timeout(3): await event.wait()",
    ],
)
def test_a_wait_with_a_deadline_is_none(line):
    assert not list(blocking_calls(f"async def f():\n    {line}\n"))
