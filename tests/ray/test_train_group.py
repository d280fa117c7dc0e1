"""What the driver tells a trainer and is told by it, without processes."""

import re
import shutil
from contextlib import nullcontext
from unittest.mock import MagicMock

import pytest
import ray
import torch.distributed as dist

from slime.backends.sglang_utils.client import EngineError
from slime.observability.run_log import RunLog
from slime.observability.spans import Span
from slime.observability.tracking import Tracker
from slime.ray import train_group, waiting
from slime.ray.losses import RanksLost, RankStarved, UpdateFailed
from slime.ray.train_group import RayTrainGroup
from slime.ray.waiting import DeadlineExceeded, ProcessDied
from slime.training.checkpoint_dir import MARKER, iteration_dir
from slime.utils.checkpoint_record import write_record
from slime.utils.types import EngineEndpoint
from slime.weight_sync.broken import GroupBroken
from slime.weight_sync.report import SyncReport
from tests.run_args import config_with


class OneProcess:
    """In place of `RankProcesses`."""

    def __init__(self, config, role, slots):
        self.standbys = 0

    def start(self, config):
        actor = MagicMock(args=config.flat)
        actor.update_weights.remote.return_value = (3, SyncReport(sent=100))
        actor.trained_steps.remote.return_value = 5
        return [actor]

    def keep_standbys(self):
        self.standbys += 1


class OfOneRank(RayTrainGroup):
    """Whose answers are there at once."""

    def _start(self):
        return [self._actors[0].init.remote()]

    def _gather(self, refs, what, seconds=None):
        return refs


@pytest.fixture
def started(monkeypatch):
    """`started(steps)`: a group that goes on with a checkpoint that tells its steps, and its log."""
    monkeypatch.setattr(train_group, "ProcessWatch", MagicMock())
    monkeypatch.setattr(train_group, "RankProcesses", OneProcess)
    monkeypatch.setattr(train_group.ray, "kill", lambda actor: actor.kill())

    def start(steps, first=4, **flags):
        given = dict(start_rollout_id=None, train_timeout=1, cluster_timeout=1, load="first", ckpt_step=7)
        given |= dict(check_served_policy=False, finetune=True)
        given |= dict(rollout_batch_size=4, n_samples_per_prompt=2, global_batch_size=4)
        config = config_with(**given | flags)
        log = RunLog(Tracker([]))
        group = OfOneRank(config, [0], MagicMock(), log)
        group._actors[0].init.remote.return_value = first
        group._pending_init = [first]
        group._actors[0].trained_steps.remote.return_value = steps
        group.wait_ready()
        return group, log

    return start


def test_the_number_of_the_next_optimizer_step_is_saved_and_gone_on_from(started):
    group, log = started(11)
    assert log.trained_steps == 11
    log.train(4, {"train": [{}, {}, {}]})
    group.save_model(4, force_sync=True)
    group._actors[0].save_model.remote.assert_called_once_with(4, True, 14, None)


def test_a_rank_that_is_slower_than_the_others_is_in_the_row_of_the_rollout(started):
    group, log = started(11)
    log.tracker = MagicMock()
    ranks = [[Span("log_probs", 0.0, seconds)] for seconds in (1.0, 1.0, 3.0)]
    outcomes = [({"perf": {"perf/train_time": 4.0}}, None, ranks[0]), *(({}, None, own) for own in ranks[1:])]
    group.end_training(4, outcomes)
    row = {"rollout/step": 4, "perf/train_time": 4.0, "perf/slow_rank": 2}
    log.tracker.log.assert_called_once_with(row, axis="rollout", step=4)
    group.end_training(5, [(outcomes[0][0], None, [])])  # nothing to compare
    assert "perf/slow_rank" not in log.tracker.log.call_args.args[0]
    group._role = "critic"
    values = [({"perf": {}}, None, [Span("values", 0.0, 3.0)]), ({}, None, [Span("values", 0.0, 1.0)])]
    group.end_training(6, values)
    log.tracker.log.assert_called_with(
        {"rollout/step": 6, "perf/critic-slow_rank": 0}, axis="rollout", step=6
    )


def test_a_save_that_failed_is_raised_to_those_who_do_not_ask_for_its_outcome(started):
    group, _ = started(11)
    group._gather = lambda refs, what: [[None, "no space"]]
    assert group.try_to_save(4) == [None, "no space"]
    with pytest.raises(RuntimeError, match="no space"):
        group.save_model(4)


@pytest.mark.parametrize(("first", "steps"), [(0, 0), (4, 8)])
def test_an_older_checkpoint_stands_for_the_steps_of_full_rollouts(started, first, steps):
    assert started(None, first)[1].trained_steps == steps


@pytest.mark.parametrize(
    ("flags", "proofs"),
    [
        (dict(check_served_policy=True, check_weight_update_equal=False), [1, 1, 1]),
        (dict(check_served_policy=True, check_weight_update_equal=True), [1, 2, 3]),
        (dict(check_served_policy=False, check_weight_update_equal=True), [0, 0, 0]),
        (dict(check_served_policy=True, served_policy_interval=2), [1, 1, 2, 2, 3]),
        (dict(check_served_policy=True, check_weight_update_equal=True, served_policy_interval=2), [1, 2, 3]),
        (dict(check_served_policy=False, served_policy_interval=1), [0, 0]),
        # At first they add nothing, and an engine without them would pass.
        (dict(check_served_policy=True, lora_rank=8, lora_merge=False), [1, 2, 3]),
    ],
)
def test_the_policy_served_is_proven_with_the_first_weights_with_every_so_many_or_with_all(
    started, flags, proofs
):
    group, _ = started(0, **flags)
    rollout, trainer = group._rollout, group._actors[0]
    rollout.updatable_engines.return_value = [EngineEndpoint("http://127.0.0.1:1", None, 1, 0)], 0
    rollout.probe_tokens.return_value = [5, 6, 7]
    trainer.update_weights.remote.return_value = 1, SyncReport()
    trainer.text_log_probs.remote.return_value = [-1.0, -2.0]
    found = []
    for _ in proofs:
        group.update_weights()
        found.append(rollout.check_policy.call_count)
    assert found == proofs
    for call in rollout.check_policy.call_args_list:
        assert call.args == ([5, 6, 7], [-1.0, -2.0])


def test_with_several_adapters_each_policy_is_proven(started):
    group, _ = started(0, check_served_policy=True, lora_rank=8, lora_merge=False, lora_adapters=["a", "b"])
    rollout, trainer = group._rollout, group._actors[0]
    rollout.updatable_engines.return_value = [EngineEndpoint("http://127.0.0.1:1", None, 1, 0)], 0
    rollout.probe_tokens.return_value = [5, 6, 7]
    trainer.update_weights.remote.return_value = 1, SyncReport()
    trainer.text_log_probs.remote.side_effect = lambda tokens, name: [-1.0 if name == "a" else -2.0] * 2
    group.update_weights()
    found = [call.args for call in rollout.check_policy.call_args_list]
    assert found == [([5, 6, 7], [-1.0, -1.0], "a"), ([5, 6, 7], [-2.0, -2.0], "b")]


def task_error(message):
    return ray.exceptions.RayTaskError("update_weights", f"Traceback:\n{message}", RuntimeError(message))


DIED = "EngineError: engine http://a: /end_weight_update: no answer: ReadError"
CUT = str(GroupBroken.of("w", RuntimeError("[pair.cc:553] Connection closed by peer [10.0.0.1]:11")))
REFUSED = "EngineError: engine http://a: /end_weight_update: HTTP 400: no session is open"


def engines_in_turn(group, *numbers):
    """`updatable_engines` tells of one engine, with these numbers one after the other."""
    group._rollout.updatable_engines.side_effect = [(["an engine"], number) for number in numbers]


@pytest.mark.parametrize(
    ("failures", "numbers"),
    [
        ([DIED], [1, 2]),
        ([DIED] * 4, [1, 2, 3, 4, 5]),
        ([REFUSED], [1, 2]),
        ([DIED], [1, 1]),  # it was slow, and is well by now
        ([DIED, REFUSED], [1, 1, 1]),  # and did late what the first attempt had asked
        ([CUT], [1, 1]),  # it can be reached again
    ],
)
def test_an_update_begins_again_as_long_as_engines_are_lost(started, monkeypatch, failures, numbers):
    group, _ = started(0, use_fault_tolerance=True)
    monkeypatch.setattr(waiting.time, "sleep", lambda seconds: None)
    engines_in_turn(group, *numbers)
    trainer = group._actors[0]
    trainer.update_weights.remote.side_effect = [*map(task_error, failures), (3, SyncReport())]
    group.update_weights()
    assert trainer.connect_rollout_engines.remote.call_count == len(numbers)  # anew each time
    suspicious = [call.kwargs for call in group._rollout.updatable_engines.call_args_list]
    assert suspicious == [{}, *[{"suspicious": True}] * len(failures)]
    group._rollout.weights_updated.assert_called_once_with(3)


def test_an_update_whose_engines_are_the_same_is_begun_again_later_each_time(started, monkeypatch):
    """Whoever has cut them off may do so for a while; one that was replaced has taken its time."""
    group, _ = started(0, use_fault_tolerance=True)
    engines_in_turn(group, 1, 1, 1, 2, 2)
    group._actors[0].update_weights.remote.side_effect = [*map(task_error, [CUT] * 4), (3, SyncReport())]
    pauses = []
    monkeypatch.setattr(waiting.time, "sleep", pauses.append)
    group.update_weights()
    assert pauses == [0.5, 1.0, 4.0]
    waiting.pause_before(9)
    assert pauses[3:] == [4.0]


@pytest.mark.parametrize(("error", "tolerant"), [(REFUSED, True), (DIED, False), (CUT, False)])
def test_an_update_that_no_engine_was_lost_in_fails(started, error, tolerant):
    group, _ = started(0, use_fault_tolerance=tolerant)
    engines_in_turn(group, 1, 1)
    group._actors[0].update_weights.remote.side_effect = task_error(error)
    with pytest.raises(ray.exceptions.RayTaskError, match=re.escape(error)):
        group.update_weights()


def test_an_update_that_fails_again_and_again_ends_the_run_by_name(started):
    group, _ = started(0, use_fault_tolerance=True)
    engines_in_turn(group, *range(9))
    group._actors[0].update_weights.remote.side_effect = task_error(DIED)
    with pytest.raises(UpdateFailed, match=rf"failed 5 times in a row: {DIED}"):
        group.update_weights()


@pytest.fixture
def saved(tmp_path):
    (tmp_path / MARKER).write_text("3")
    for iteration in (2, 3):
        directory = iteration_dir(tmp_path, iteration)
        directory.mkdir()
        (directory / "metadata.json").write_text("{}")
        write_record(directory, 0, 1)
    return str(tmp_path)


def cut(saved, *iterations):
    for iteration in iterations:
        (iteration_dir(saved, iteration) / "metadata.json").write_text("{")


def test_ranks_are_left_alone_if_there_is_nothing_to_build_them_again_from(started, tmp_path):
    group, _ = started(0)
    with pytest.raises(ValueError, match=f"actor: no checkpoint in {tmp_path}"):
        group.rebuild(tmp_path)
    group._actors[0].kill.assert_not_called()


class Torn(Exception):
    """An update that ends half-way."""


@pytest.mark.parametrize("torn", [False, True])
def test_new_ranks_go_on_from_the_version_that_engines_may_have(started, saved, torn):
    group, log = started(0)
    lost, watch = group._actors[0], group._watch
    group._rollout.updatable_engines.return_value = (["an engine"], 1)
    group.update_weights()
    lost.update_weights.remote.side_effect = Torn if torn else None
    with pytest.raises(Torn) if torn else nullcontext():
        group.update_weights()
    log.train(4, {"train": [{}] * 9})
    group.rebuild(saved)
    assert log.trained_steps == 5
    lost.kill.assert_called_once_with()
    watch.wait_until_gone.assert_called_once_with(1)
    (new,) = group._actors
    assert new is not lost
    assert (new.args.load, new.args.ckpt_step, new.args.finetune) == (saved, None, False)
    new.go_on.remote.assert_called_once_with(3, torn)
    new.connect_rollout_engines.remote.assert_not_called()
    assert group.processes.standbys == 2  # after the start, and after this
    group.update_weights()
    new.connect_rollout_engines.remote.assert_called_once_with(["an engine"])


def test_new_ranks_go_on_from_the_newest_whole_checkpoint(started, saved, caplog):
    cut(saved, 3)
    group, _ = started(0)
    group.rebuild(saved)
    assert group._actors[0].args.ckpt_step == 2
    reason = "iter_0000003: metadata.json has 1 bytes (wanted: 2)"
    assert f"actor: {saved}: {reason}: iteration 2 is loaded" in caplog.text


@pytest.mark.parametrize("in_memory", [False, True])
def test_what_flags_leave_out_of_checkpoints_is_not_loaded_from_them(started, saved, caplog, in_memory):
    left_out = dict(no_save_optim=True, no_save_rng=True)
    group, _ = started(0, trainer_snapshots=saved if in_memory else "elsewhere", **left_out)
    group.rebuild(saved)
    args = group._actors[0].args
    assert args.no_load_optim is args.no_load_rng is not in_memory
    told = f"actor: iteration 3 of {saved} has no optimizer state: optimizer and learning-rate schedule begin"
    assert (told in caplog.text) is not in_memory


def test_ranks_are_left_alone_if_no_checkpoint_is_whole(started, saved):
    cut(saved, 2, 3)
    group, _ = started(0)
    reasons = "; ".join(f"iter_000000{n}: metadata.json has 1 bytes \\(wanted: 2\\)" for n in (3, 2))
    with pytest.raises(ValueError, match=f"actor: no whole checkpoint in {saved} to .*: {reasons}$"):
        group.rebuild(saved)
    shutil.rmtree(iteration_dir(saved, 3))
    with pytest.raises(ValueError, match="iteration 3, which its marker names, is missing"):
        group.rebuild(saved)
    group._actors[0].kill.assert_not_called()


def test_a_step_says_what_its_weight_updates_took(started, monkeypatch):
    """Bytes of ranks add up, times do not; those of a step's updates do."""
    group, log = started(0, check_served_policy=False, check_weight_update_equal=False)
    endpoint = EngineEndpoint("http://127.0.0.1:1", None, 1, 0)
    group._rollout.updatable_engines.return_value = [endpoint], 0
    ranks = [(1, SyncReport(3 * 10**9, 2.0, 2.5, floor=0.5, commit=1.5)), (1, SyncReport(10**9, 1.0, 0.0))]
    monkeypatch.setattr(group, "call_all", lambda what, name, *args: ranks)
    for _ in range(2):
        group.update_weights()
    found = []
    monkeypatch.setattr(log, "rollout", lambda rollout_id, metrics: found.append(metrics))
    log.end_step(0)
    (row,) = found
    names = ("wire_bytes", "transfer_time", "gb_per_s", "pause_time", "floor_time", "floor_share")
    assert [row[f"perf/update_weights_{name}"] for name in names] == [8 * 10**9, 4.0, 2.0, 5.0, 1.0, 0.25]
    assert row["perf/update_weights_commit_time"] == 3.0


@pytest.mark.parametrize(("without", "times"), [(True, []), (False, ["perf/update_weights_time"])])
def test_a_step_without_engines_says_nothing_of_weight_updates(started, monkeypatch, without, times):
    """As of fine-tuning, whose lines told of 0.0 seconds; an update that finds no engine alive is told."""
    group, log = started(0, debug_train_only=without)
    group._rollout.updatable_engines.return_value = [], 0
    group.update_weights()
    found = {}
    monkeypatch.setattr(log, "rollout", lambda rollout_id, metrics: found.update(metrics))
    log.end_step(0)
    assert [name for name in found if "update_weights" in name] == times


def test_weights_are_published_where_there_are_no_engines(started):
    """Nobody is asked what they serve, and ranks connect before the first version alone."""
    group, _ = started(0, debug_train_only=True, publish_weights=True)
    rollout, trainer = group._rollout, group._actors[0]
    rollout.updatable_engines.return_value = [], 0
    trainer.update_weights.remote.return_value = 1, SyncReport()
    group.update_weights()
    group.update_weights()
    assert trainer.update_weights.remote.call_count == 2
    trainer.connect_rollout_engines.remote.assert_called_once_with([])
    assert not rollout.weights_updated.called and not rollout.check_policy.called


@pytest.mark.parametrize("ask", ["_steps_of_checkpoint", "_start"])
def test_a_rank_that_is_lost_while_the_first_one_is_asked_counts_as_lost(started, monkeypatch, ask):
    def wait(refs, what, seconds, look):
        raise ProcessDied(f"{what}: ended")

    group, _ = started(11)
    monkeypatch.setattr(train_group, "wait_all", wait)
    monkeypatch.setattr(OfOneRank, "_gather", RayTrainGroup._gather)
    monkeypatch.setattr(OfOneRank, "_start", RayTrainGroup._start)
    with pytest.raises(RanksLost, match=r"actor: .*: ended"):
        getattr(group, ask)()


CLOSED = "[pair.cc:553] Connection closed by peer [127.0.0.1]:7"


def failing(error):
    def wait(refs, what, seconds, look):
        raise ray.exceptions.RayTaskError("train", f"Traceback:\n{error}", error).as_instanceof_cause()

    return wait


@pytest.mark.parametrize("error", [RuntimeError(CLOSED), dist.DistNetworkError("Broken pipe")])
def test_ranks_whose_connections_to_each_other_end_are_lost_though_they_live(started, monkeypatch, error):
    group, _ = started(11)
    monkeypatch.setattr(train_group, "wait_all", failing(error))
    told = rf"^actor: training: ranks have lost their connections to each other: .*{re.escape(str(error))}"
    with pytest.raises(RanksLost, match=told):
        RayTrainGroup._gather(group, [], "training")


def test_a_rank_that_may_open_no_more_files_is_named(started, monkeypatch):
    group, _ = started(11)
    error = RuntimeError("[enforce fail at socket.cc:24] rv != -1. socket: Too many open files")
    monkeypatch.setattr(train_group, "wait_all", failing(error))
    told = f"actor: loading: a rank lacks descriptors, threads or memory: {error}"
    with pytest.raises(RankStarved, match=re.escape(told)):
        RayTrainGroup._gather(group, [], "loading")


@pytest.mark.parametrize(
    "error",
    [
        GroupBroken.of("w", RuntimeError(CLOSED)),
        EngineError("http://a", "/update_weights_from_distributed", 500, CLOSED),
        RuntimeError(
            f"weight sync, step 'send weights': rank 0 failed: {GroupBroken.of('w', OSError(CLOSED))}"
        ),
        RuntimeError(
            "--update-weight-disk-dir s3://a: [Errno 104] Connection reset by peer (wanted: a place"
        ),
        BrokenPipeError("Broken pipe"),  # of the user's code
        RuntimeError("tokens do not fit"),
    ],
)
def test_ranks_that_fail_otherwise_are_not(started, monkeypatch, error):
    group, _ = started(11)
    monkeypatch.setattr(train_group, "wait_all", failing(error))
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        RayTrainGroup._gather(group, [], "training")
    assert caught.value.cause is error


def test_a_wait_beyond_its_deadline_shows_what_the_ranks_are_in(started, monkeypatch):
    group, _ = started(11)
    monkeypatch.setattr(train_group, "wait_all", MagicMock(side_effect=DeadlineExceeded("no answer")))
    with pytest.raises(DeadlineExceeded):
        RayTrainGroup._gather(group, [], "training")
    group._watch.show_stacks.assert_called_once_with()
