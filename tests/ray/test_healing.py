"""What the loops do again when they have lost processes."""

import itertools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from slime.ray import asynchronous, healing, rollout_group
from slime.ray.healing import Healing
from slime.ray.losses import RanksLost, RolloutSideLost
from slime.ray.members import Members
from slime.ray.pending_rollout import Generated, PendingRollout
from slime.ray.policy_groups import PolicyGroups
from slime.ray.rollout_group import MANAGER_RESTARTS, RolloutGroup
from slime.ray.synchronous import train
from slime.ray.trainer_snapshots import TrainerSnapshots
from slime.ray.waiting import ProcessDied
from tests.run_args import config_with


@pytest.fixture(autouse=True)
def node(monkeypatch):
    """Whether the driver's node lives."""
    found = SimpleNamespace(lives=True)
    monkeypatch.setattr(healing, "node_is_alive", lambda: found.lives)
    return found


class Recorded:
    """Writes down the calls of a role; may lose the rollout side in some."""

    def __init__(self, calls: list[Any], names: tuple[str, ...]) -> None:
        self.calls, self._names = calls, names

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if name in self._names:
                self.calls.append((name, *arguments[:1]) if name in ("generate", "train", "eval") else name)
            return []

        return call


class Rollouts(Recorded):
    """A rollout side that is lost in the calls that ``losses`` counts.

    Attributes:
        losses: by call, how often it still fails.
    """

    num_rollout_per_epoch = None

    def __init__(self, calls: list[Any], losses: dict[Any, int], limit: int = MANAGER_RESTARTS) -> None:
        super().__init__(calls, ())
        self.losses, self.limit, self.restarts, self.since = losses, limit, 0, 0
        self.kept = 0

    def _ask(self, call: Any) -> None:
        self.calls.append(call)
        if self.losses.get(call, 0):
            self.losses[call] -= 1
            raise RolloutSideLost(f"lost in {call}")

    def keep_state(self) -> None:
        self.kept += 1

    def generate(self, rollout_id: int) -> list[Any]:
        self._ask(("generate", rollout_id))
        return []

    def eval(self, rollout_id: int) -> None:
        self._ask(("eval", rollout_id))

    def offload(self) -> None:
        self._ask("offload")

    def onload_kv(self) -> None:
        self._ask("onload_kv")

    def unsaved(self, rollout_id: int) -> None:
        self._ask(("unsaved", rollout_id))

    def end_step(self) -> None:
        self.since = 0
        self.calls.append("end_step")

    def may_restart(self) -> bool:
        return self.since < self.limit

    def restart(self, lost: RolloutSideLost) -> None:
        self.since += 1
        self.restarts += 1
        self._ask("restart")


def played(losses: dict[Any, int], **flags: Any) -> tuple[list[Any], Rollouts]:
    """The calls of a run of two steps."""
    calls: list[Any] = []
    actor = Recorded(calls, ("train", "update_weights", "onload"))
    actor.start_rollout_id, actor.checkpoints = 0, None
    actor.try_to_save = lambda *_, **__: [None]
    rollout = Rollouts(calls, losses)
    given = dict(num_rollout=2, eval_interval=1, skip_eval_before_train=True, save_interval=1) | flags
    train(config_with(**given), actor, MagicMock(checkpoints=None), rollout, MagicMock())
    return calls, rollout


STEP = [
    "offload",
    ("unsaved", 0),
    "onload",
    ("train", 0),
    "end_step",
    "update_weights",
    "onload_kv",
    ("eval", 1),
]
AGAIN = ["restart", "onload", "update_weights", "onload_kv"]


def first_step(calls: list[Any]) -> list[Any]:
    begin, end = calls.index(("generate", 0)), calls.index(("generate", 1))
    return calls[begin:end]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (("generate", 0), [("generate", 0), *AGAIN, ("generate", 0), *STEP]),
        ("offload", [("generate", 0), "offload", *AGAIN, ("generate", 0), *STEP]),
        (("unsaved", 0), [("generate", 0), "offload", ("unsaved", 0), *AGAIN, ("generate", 0), *STEP]),
        # The step has been taken, and the next one begins with newer data.
        (("eval", 1), [("generate", 0), *STEP, *AGAIN, ("eval", 1)]),
    ],
)
def test_a_lost_rollout_side_costs_the_step_under_way(where: Any, expected: list[Any]) -> None:
    calls, rollout = played({where: 1})
    assert first_step(calls) == expected
    assert (rollout.restarts, rollout.kept) == (1, 1)


def test_weights_are_sent_again_if_it_is_lost_while_it_gets_them() -> None:
    calls, rollout = played({"onload_kv": 1})
    # Not once more: a trainer that shares GPUs is away, and engines have their memory.
    assert calls[: 2 + len(AGAIN)] == ["update_weights", "onload_kv", *AGAIN]
    assert calls.count("update_weights") == 4  # of three, with one by the restart
    assert rollout.restarts == 1


def test_it_may_be_lost_while_it_starts_again() -> None:
    calls, _ = played({("generate", 1): 1, "restart": 2})
    assert calls.count("restart") == 3 == MANAGER_RESTARTS
    assert [call for call in calls if call[0] == "train"] == [("train", 0), ("train", 1)]


def test_one_that_is_lost_again_and_again_ends_the_run_by_its_name() -> None:
    with pytest.raises(RolloutSideLost, match="lost in restart"):
        played({("generate", 1): 1, "restart": 9})


def test_nothing_is_started_again_on_a_node_that_is_given_up(node, lose) -> None:
    """It would wait for the start until the time for that is over; the end is told at once."""
    node.lives = False
    with pytest.raises(RolloutSideLost, match="lost in"):
        played({("generate", 1): 1})
    with pytest.raises(RanksLost, match="lost in 2"):
        lose([2])


class Roles(Recorded):
    """A trainer that is lost while it trains on these rollouts; the first one has a checkpoint."""

    start_rollout_id, checkpoints = 0, "saved"

    def __init__(self, calls: list[Any], losses: list[int], failed_starts: int = 0) -> None:
        super().__init__(calls, ("onload", "update_weights"))
        self.losses, self.failed_starts = losses, failed_starts

    def train(self, rollout_id: int, batch: Any, values: Any) -> None:
        self.calls.append(("train", rollout_id))
        if rollout_id in self.losses:
            self.losses.remove(rollout_id)
            raise RanksLost(f"lost in {rollout_id}")

    def try_to_save(self, *arguments: Any, **options: Any) -> list[None]:
        return [None]

    def rebuild(self, load: str, up_to: int) -> int:
        self.calls.append(("rebuild", load, up_to))
        if self.failed_starts:
            self.failed_starts -= 1
            raise RanksLost("lost while they start")
        return up_to + 1


class WithEnds(Rollouts):
    def end(self) -> None:
        self.calls.append("end")

    def go_back(self, load: str, rollout_id: int, state: Any = None) -> None:
        self._ask(("go back", load, rollout_id))


@pytest.fixture
def lose(monkeypatch: pytest.MonkeyPatch):
    """`lose(losses, tolerant, newest)`: the calls of a run of four steps that loses its ranks."""

    def run(
        losses: list[int],
        tolerant: bool = True,
        newest: int | None = 0,
        of_rollout: Any = None,
        failed_starts: int = 0,
        **flags: Any,
    ) -> list[Any]:
        monkeypatch.setattr(healing, "newest_of_all", lambda roots, verify: newest)
        calls: list[Any] = []
        rollout = WithEnds(calls, of_rollout or {})
        given = dict(num_rollout=4, eval_interval=None, save_interval=9, save="saved") | flags
        config = config_with(use_fault_tolerance=tolerant, **given)
        actor: Any = Roles(calls, losses, failed_starts)
        train(config, actor, MagicMock(checkpoints=None), rollout, MagicMock())  # type: ignore[arg-type]
        return calls

    return run


BACK = ["end", ("rebuild", "saved", 0), "end", ("go back", "saved", 0), "onload", "update_weights"]


def trained(calls: list[Any]) -> list[int]:
    return [call[1] for call in calls if call[0] == "train"]


def test_lost_ranks_cost_the_steps_since_the_checkpoint(lose) -> None:
    calls = lose([2])
    assert trained(calls) == [0, 1, 2, 1, 2, 3]
    lost = calls.index(("train", 2))
    assert calls[lost + 1 : lost + 1 + len(BACK)] == BACK


def test_the_rollout_side_may_be_lost_meanwhile(lose) -> None:
    calls = lose([2], of_rollout={("go back", "saved", 0): 1})
    assert trained(calls) == [0, 1, 2, 1, 2, 3]


def test_ranks_may_be_lost_while_they_start_again(lose) -> None:
    calls = lose([2], failed_starts=2)
    assert [call[0] for call in calls].count("rebuild") == 3
    assert trained(calls) == [0, 1, 2, 1, 2, 3]


def test_ranks_that_never_start_again_end_the_run(lose) -> None:
    with pytest.raises(RanksLost, match="lost while they start"):
        lose([2], failed_starts=9)


def test_ranks_that_are_lost_again_and_again_end_the_run(lose) -> None:
    """Steps that were taken before are no progress."""
    with pytest.raises(RanksLost, match="lost in 2"):
        lose([2] * 4)
    assert trained(lose([2] * 3 + [3] * 3)).count(3) == 4


def loses_in_update(lose, monkeypatch, updates: tuple[int, ...], newest: int) -> list[Any]:
    """The calls of a run of four steps, evaluated after each, of which these updates lose the ranks."""
    given = itertools.count()

    def update_weights(self: Any) -> None:
        self.calls.append("update_weights")
        if next(given) in updates:
            raise RanksLost("lost in an update")

    monkeypatch.setattr(Roles, "update_weights", update_weights, raising=False)
    return lose([], newest=newest, eval_interval=1, skip_eval_before_train=True)


def test_ranks_lost_after_the_last_checkpoint_cost_no_rollout(lose, monkeypatch) -> None:
    calls = loses_in_update(lose, monkeypatch, (4,), newest=3)
    assert trained(calls) == [0, 1, 2, 3] and ("rebuild", "saved", 3) in calls
    assert [call for call in calls if call[0] == "eval"] == [("eval", step) for step in (1, 2, 3, 4)]


def test_ranks_lost_between_a_checkpoint_and_its_evaluation_leave_it_out_not(lose, monkeypatch) -> None:
    calls = loses_in_update(lose, monkeypatch, (2, 3), newest=1)
    assert trained(calls) == [0, 1, 2, 3]
    assert [call for call in calls if call[0] == "eval"] == [("eval", step) for step in (1, 2, 3, 4)]


def test_the_trainers_of_all_policies_go_back_to_what_all_have_saved(monkeypatch) -> None:
    looked: list[Any] = []
    monkeypatch.setattr(healing, "newest_of_all", lambda roots, verify: looked.append(roots) or 0)
    calls: list[Any] = []
    roles = {name: Roles(calls, []) for name in "ab"}
    for name, role in roles.items():
        role.checkpoints = f"saved {name}"
    losses = [2]

    def take(rollout_id: int) -> None:
        calls.append(("train", rollout_id))
        if losses and rollout_id == losses[0]:
            raise RanksLost(f"lost in {losses.pop()}")

    config = config_with(use_fault_tolerance=True, save="saved a")
    groups, critic = PolicyGroups(roles), MagicMock(checkpoints=None)  # type: ignore[arg-type]
    rollout: Any = WithEnds(calls, {})
    snapshots = TrainerSnapshots(config, groups, critic, rollout)
    Healing(config, groups, critic, rollout, snapshots, groups.update_weights).take_all(take, range(4))
    assert looked == [["saved a", "saved b"]] and trained(calls) == [0, 1, 2, 1, 2, 3]
    lost = calls.index(("train", 2))
    rebuilt = [("rebuild", "saved a", 0), ("rebuild", "saved b", 0)]
    back = ["end", ("go back", "saved a", 0), *["onload"] * 2, *["update_weights"] * 2]
    assert calls[lost + 1 : calls.index(("train", 1), lost)] == ["end", *rebuilt, *back]


@pytest.mark.parametrize("most", [0, 1, 5])
def test_ranks_start_again_as_often_as_the_flag_says(lose, most: int) -> None:
    assert trained(lose([2] * most, max_trainer_restarts=most)).count(2) == most + 1
    with pytest.raises(RanksLost, match="lost in 2"):
        lose([2] * (most + 1), max_trainer_restarts=most)


@pytest.mark.parametrize(("tolerant", "newest"), [(False, 0), (True, None)])
def test_lost_ranks_end_the_run_without_fault_tolerance_or_a_checkpoint(lose, tolerant, newest) -> None:
    with pytest.raises(RanksLost, match="lost in 2"):
        lose([2], tolerant, newest)


class AheadRollouts(WithEnds):
    """What is under way is lost with the manager, and asked for again."""

    pending: PendingRollout | None = None

    def async_generate(self, rollout_id: int, updates_ahead: int = 0) -> PendingRollout:
        start = lambda: [self.calls.append(("begin", rollout_id)), rollout_id]
        self.pending = PendingRollout(start, lambda _: self._ask(("finish", rollout_id)))
        return self.pending

    def restart(self, lost: RolloutSideLost) -> None:
        assert self.pending is None or self.pending.lose() is None
        super().restart(lost)


@pytest.fixture
def play_ahead(monkeypatch: pytest.MonkeyPatch):
    """`play_ahead(losses, of_ranks)`: the calls of a run of three steps of train_async.py."""

    def run(losses: dict[Any, int], of_ranks: tuple[int, ...] = (), **flags: Any) -> list[Any]:
        monkeypatch.setattr(healing, "newest_of_all", lambda roots, verify: 0)
        calls: list[Any] = []
        rollout, actor = AheadRollouts(calls, losses), Roles(calls, list(of_ranks))
        actor._names = ("update_weights", "follow_engines")
        given = dict(num_rollout=3, eval_interval=2, save_interval=9, use_fault_tolerance=True) | flags
        config = config_with(**given)
        asynchronous.train(config, actor, MagicMock(checkpoints=None), rollout, MagicMock())  # type: ignore[arg-type]
        return calls

    return run


def from_the_second(calls: list[Any]) -> list[Any]:
    return calls[calls.index(("begin", 1)) : calls.index(("begin", 2))]


def test_a_rollout_under_way_is_made_again_and_one_that_is_there_is_held(play_ahead) -> None:
    begun = play_ahead({})
    assert [call for call in begun if call[0] in ("begin", "train")] == [
        *(("begin", 0), ("begin", 1), ("train", 0), ("begin", 2), ("train", 1), ("train", 2))
    ]
    again = ["restart", "update_weights", ("begin", 1), ("finish", 1), "end_step", "follow_engines"]
    lost = from_the_second(play_ahead({("finish", 1): 1}))
    assert lost[: 3 + len(again)] == [("begin", 1), ("train", 0), ("finish", 1), *again]
    assert lost.count(("train", 0)) == 1


def test_an_evaluation_and_an_update_that_are_lost_repeat_no_rollout(play_ahead) -> None:
    for where in (("eval", 2), "restart"):
        calls = play_ahead({("eval", 2): 1, where: 1})
        assert [call[1] for call in calls if call[0] == "begin"] == [0, 1, 2]
        assert "restart" in calls and calls.count(("eval", 2)) == 2


def test_what_is_held_is_dropped_where_ranks_are_lost(play_ahead) -> None:
    calls = play_ahead({}, of_ranks=(2,))
    assert trained(calls) == [0, 1, 2, 1, 2]
    assert [call[1] for call in calls if call[0] == "begin"] == [0, 1, 2, 1, 2]
    calls = play_ahead({}, of_ranks=(1,))
    assert trained(calls) == [0, 1, 1, 2]
    assert [call[1] for call in calls if call[0] == "begin"] == [0, 1, 2, 1, 2]


def test_train_async_that_tolerates_nothing_ends_with_its_loss(play_ahead) -> None:
    with pytest.raises(RanksLost, match="lost in 1"):
        play_ahead({}, of_ranks=(1,), use_fault_tolerance=False)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> RolloutGroup:
    """The rollout side without Ray: its manager tells a state of the data, or dies."""
    monkeypatch.setattr(rollout_group, "ray", MagicMock())
    monkeypatch.setattr(rollout_group, "ProcessWatch", MagicMock())
    monkeypatch.setattr(rollout_group, "wait_one", lambda ref, what, *_: answer(what))
    answers: dict[str, Any] = {"num_rollout": 3, "notices": [], "engine_processes": [], "offload": None}
    answers["ask_membership"] = None, members_of(0)

    def answer(what: str) -> Any:
        found = answers.get(what.rpartition(": ")[2])
        if isinstance(found, Exception):
            raise found
        return found

    config = config_with(use_fault_tolerance=True, num_rollout=3)
    group = RolloutGroup(config, [], 0, log_of_phases(), needs_offload=False)  # type: ignore[arg-type]
    group.answers = answers  # type: ignore[attr-defined]
    group.wait_ready()
    return group


def members_of(number: int, *places: int) -> Members:
    return Members(number, frozenset(places), frozenset(), {})


def log_of_phases() -> Any:
    log = MagicMock()
    log.phase = lambda *_, **__: nullcontext()
    return log


DIED = ProcessDied("rollout manager: check: rank 0 (process 7 on 10.0.0.1) was killed by SIGKILL")


def test_engines_of_another_start_are_others_for_each_policy(group: Any) -> None:
    """Also where one policy had more of them than another before, and as many as that one now."""
    group.answers["data_state"] = {"read": 1}
    group.keep_state()
    before = {}
    for policy, launches in (("a", 2), ("b", 1)):
        group.answers["updatable_engines"] = ([], launches)
        before[policy] = group.updatable_engines(policy=policy)
    group.restart(RolloutSideLost("lost"))
    group.answers["updatable_engines"] = ([], 1)
    after = {policy: group.updatable_engines(policy=policy) for policy in before}
    assert before == {"a": ([], 2), "b": ([], 1)} and after == {"a": ([], 3), "b": ([], 2)}


def test_without_a_state_of_the_data_a_lost_manager_ends_the_run(group: Any) -> None:
    """As of a data source of the user's, and without fault tolerance."""
    group.answers["data_state"] = None
    group.keep_state()
    group.answers["check"] = DIED
    assert not group.may_restart()
    with pytest.raises(ProcessDied, match="killed by SIGKILL"):
        group.check()


def test_training_goes_on_while_a_manager_is_lost_that_can_be_started_again(group: Any) -> None:
    group.answers["data_state"] = {"sample_offset": 4}
    group.keep_state()
    group.answers.update(check=DIED, offload=DIED, eval=DIED)
    group.check()
    with pytest.raises(RolloutSideLost, match="killed by SIGKILL"):
        group.eval(1)


def test_a_new_manager_goes_on_from_the_data_before_the_step(group: Any) -> None:
    """And its engines are others, even at the same addresses."""
    group.answers.update(data_state={"sample_offset": 4}, updatable_engines=(["an engine"], 2))
    group.keep_state()
    group.set_train_parallel_config({"dp_size": 2})
    before, first = group.updatable_engines(), group._manager
    group.position = 0, {"sample_offset": 8}
    restored = []
    real = group._call
    group._call = lambda method, *given, **more: (
        restored.append((method, *given)),
        real(method, *given, **more),
    )[1]
    group.restart(RolloutSideLost("lost"))
    assert ("restore", {"sample_offset": 4}) in restored
    assert ("set_train_parallel_config", {"dp_size": 2}, "default") in restored
    rollout_group.ray.kill.assert_called_once_with(first)  # type: ignore[attr-defined]
    assert group.updatable_engines() == (before[0], before[1] + 2)
    group.end_step()
    group.restart(RolloutSideLost("lost"))
    assert ("restore", {"sample_offset": 8}) in restored


def test_a_new_manager_is_told_who_belonged_to_the_fleet(group: Any) -> None:
    """As it was after the last update, or when somebody asked the fleet for something since."""
    told = lambda: rollout_group.ray.remote.return_value.options.return_value.remote.call_args.args[3]  # type: ignore[attr-defined]
    assert told() is None
    group.answers["data_state"] = {"sample_offset": 4}
    group.answers["ask_membership"] = None, members_of(1, 0, 1)
    group.keep_state()
    group.restart(RolloutSideLost("lost"))
    assert told() == members_of(1, 0, 1)
    group.answers["drain"] = "done", members_of(2, 1)
    assert group.ask_fleet("drain", [0], 60.0) == "done"
    group.restart(RolloutSideLost("lost"))
    assert told() == members_of(2, 1)
    group.answers["ask_membership"] = None, members_of(3, 1, 2)
    group.weights_updated(7)
    group.restart(RolloutSideLost("lost"))
    assert told() == members_of(3, 1, 2)


def test_a_rollout_has_an_answer_for_each_shard_and_tells_what_could_not_be_saved(group: Any) -> None:
    """Answers are the driver's, and outlive the manager."""
    group.answers["rollout 3"] = Generated({}, [], [], {"sample_offset": 8}, "no space")
    method = group._manager.generate.options
    method.return_value.remote.return_value = ["told", "shard 0", "shard 1"]
    group.set_train_parallel_config({"dp_size": 2})
    pending = group.async_generate(3, updates_ahead=1)
    assert pending.result() == ["shard 0", "shard 1"]
    method.assert_called_once_with(num_returns=3)
    method.return_value.remote.assert_called_once_with(3, 1)
    assert [group.unsaved(3), group.unsaved(3), group.unsaved(2)] == ["no space", None, None]
    assert pending.result() == ["shard 0", "shard 1"] and group.position == (3, {"sample_offset": 8})


def test_a_position_that_is_saved_the_second_time_is_saved(group: Any) -> None:
    """Ranks were lost before the checkpoint, and the run went back."""
    group._manager.generate.options.return_value.remote.return_value = "told"
    for unsaved in ("no space", None):
        group.answers["rollout 3"] = Generated({}, [], [], None, unsaved)
        group.generate(3)
    assert group.unsaved(3) is None


def test_without_a_trainer_a_rollout_has_no_shards(group: Any) -> None:
    group.answers["rollout 0"] = Generated({}, [], [], None, None)
    assert list(group.generate(0)) == []
    group._manager.generate.options.assert_called_once_with(num_returns=1)
