"""Several policies in one run: each has its own slots, engines, samples, trainer and log."""

from typing import Any
from unittest.mock import MagicMock, call

import pytest

from slime.config.served_models import DEFAULT
from slime.observability.policy_log import PolicyLog, silent_steps
from slime.observability.run_log import RunLog
from slime.observability.tracking import Tracker
from slime.ray import setup
from slime.ray.placement_group import Layout, Placement, Slots, placement_layout
from slime.ray.policies import policy_configs
from slime.ray.policy_groups import PolicyGroups
from slime.ray.policy_samples import PolicySamples, samples_of_policies
from slime.ray.policy_side import PolicySide
from slime.ray.rollout_group import RolloutGroup
from slime.rollout.base_types import RolloutError
from slime.rollout.generation import policy_url
from slime.training.batch import BatchError
from slime.utils.types import Sample
from tests.run_args import config_with, run_args


def of_two(**flags: Any) -> Any:
    """A run of two policies, of one and of two GPUs of training, and two and one of engines."""
    each = {
        "a": run_args(actor_num_gpus_per_node=1, rollout_num_gpus=2),
        "b": run_args(actor_num_gpus_per_node=2, rollout_num_gpus=1),
    }
    return config_with(trained_policies=each, **flags)


def test_trainers_stand_one_after_the_other_and_engines_after_them() -> None:
    config = of_two()
    assert placement_layout(config) == Layout(trainer=3, rollout=3, rollout_offset=3)
    slots = Slots(None, tuple(range(6)), tuple(range(6)), ("n",) * 6)
    placement = Placement(placement_layout(config), slots.slice(0, 3), slots.slice(3, 6), slots.slice(0, 0))
    policies = policy_configs(config)
    assert [placement.actor_of(policies, name).bundles for name in policies] == [(0,), (1, 2)]
    alone = policy_configs(config_with())
    assert placement.actor_of(alone, DEFAULT).bundles == (0, 1, 2)


def test_samples_go_to_the_policy_that_they_name() -> None:
    samples = [Sample(index=i, policy=policy) for i, policy in enumerate("abba")]
    found = samples_of_policies(["a", "b", "c"], samples)
    assert {name: [s.index for s in own] for name, own in found.items()} == {
        "a": [0, 3],
        "b": [1, 2],
        "c": [],
    }


@pytest.mark.parametrize("policy", [None, "c"])
def test_a_sample_of_no_policy_of_the_run_is_refused(policy: str | None) -> None:
    with pytest.raises(BatchError, match=f"sample 7 of group 1: policy is {policy!r} .wanted: a or b"):
        samples_of_policies(["a", "b"], [Sample(index=7, group_index=1, policy=policy)])


def test_each_policy_is_asked_at_its_router() -> None:
    routers = {"a": ("127.0.0.1", 1), "b": ("127.0.0.1", 2)}
    config = of_two(sglang_model_routers=routers, sglang_router_ip="127.0.0.1", sglang_router_port=1)
    found = [policy_url(config, Sample(policy=policy)) for policy in ("a", "b", None)]
    assert found == [f"http://127.0.0.1:{port}/generate" for port in (1, 2, 1)]
    with pytest.raises(RolloutError, match=r"policy is 'c' .wanted: a or b"):
        policy_url(config, Sample(policy="c"))
    alone = r"policy is 'a' .wanted: none, without --policies or --sglang-config"
    for own in ({}, {"default": ("127.0.0.1", 1)}):
        with pytest.raises(RolloutError, match=alone):
            policy_url(config_with(sglang_model_routers=own), Sample(policy="a"))


def test_a_model_that_is_served_and_not_trained_is_asked_too() -> None:
    routers = {"policy": ("127.0.0.1", 1), "past": ("127.0.0.1", 2)}
    config = config_with(sglang_model_routers=routers, sglang_router_ip="127.0.0.1", sglang_router_port=1)
    found = [policy_url(config, Sample(policy=policy)) for policy in (None, "past")]
    assert found == [f"http://127.0.0.1:{port}/generate" for port in (1, 2)]
    with pytest.raises(RolloutError, match=r"policy is 'pst' .wanted: past or policy"):
        policy_url(config, Sample(policy="pst"))


def test_a_policy_without_a_sample_is_named() -> None:
    own = PolicySamples(config_with(policy_name="b"))
    own.check_batch("play", [])
    own.parallel_config = {"dp_size": 1}
    with pytest.raises(RuntimeError, match=r"^play returned no sample of policy b, wanted some to train on$"):
        own.check_batch("play", [])
    own = PolicySamples(config_with(policy_name=None))
    own.parallel_config = {"dp_size": 1}
    with pytest.raises(RuntimeError, match=r"^play returned no sample, wanted some to train on$"):
        own.check_batch("play", [])


class Group:
    """A trainer that notes what is asked of it."""

    def __init__(self, name: str, calls: list[Any], start: int = 0) -> None:
        self.name, self.calls, self.start_rollout_id = name, calls, start
        self.saved: list[str | None] = [None]
        self.shards = 1

    def __getattr__(self, method: str) -> Any:
        def note(*arguments: Any) -> str:
            self.calls.append((self.name, method, *arguments))
            return f"{self.name}'s"

        return note

    def try_to_save(self, rollout_id: int, force_sync: bool) -> list[str | None]:
        return self.saved


def test_policies_train_side_by_side_on_their_own_shards() -> None:
    calls: list[Any] = []
    a, b = Group("a", calls), Group("b", calls)
    a.shards, b.shards = 2, 1
    PolicyGroups({"a": a, "b": b}).train(3, ["a0", "a1", "b0"])  # type: ignore[dict-item,list-item]
    assert calls == [
        ("a", "begin_training", 3, ["a0", "a1"], None),
        ("b", "begin_training", 3, ["b0"], None),
        ("a", "end_training", 3, "a's"),
        ("b", "end_training", 3, "b's"),
    ]


@pytest.mark.parametrize(
    "method", ["update_weights", "onload", "offload", "offload_training_state", "shutdown"]
)
def test_what_is_asked_of_the_trainer_is_asked_of_each(method: str) -> None:
    calls: list[Any] = []
    getattr(PolicyGroups({name: Group(name, calls) for name in "ab"}), method)()  # type: ignore[dict-item]
    assert calls == [("a", method), ("b", method)]


def test_a_save_is_whole_if_that_of_every_policy_is() -> None:
    a, b = Group("a", []), Group("b", [])
    groups = PolicyGroups({"a": a, "b": b})  # type: ignore[dict-item]
    assert groups.try_to_save(0) == [None]
    b.saved = ["full"]
    assert groups.try_to_save(0) == ["b: full"]
    a.saved, b.saved = [None, None], [None, "full"]
    assert groups.try_to_save(0) == [None, "b: full"]
    a.saved, b.saved = [], []  # in the background
    assert groups.try_to_save(0) == []


def test_policies_that_would_go_on_with_different_rollouts_end_the_run() -> None:
    groups = {name: Group(name, [], start) for name, start in (("a", 2), ("b", 3))}
    with pytest.raises(RuntimeError, match="a with rollout 2, b with rollout 3"):
        PolicyGroups(groups).wait_ready()  # type: ignore[arg-type]
    groups["b"].start_rollout_id = 2
    PolicyGroups(groups).wait_ready()  # type: ignore[arg-type]
    assert PolicyGroups(groups).start_rollout_id == 2  # type: ignore[arg-type]


def test_a_trainer_speaks_to_the_rollout_side_for_its_policy() -> None:
    rollout = MagicMock(spec=RolloutGroup)
    side = PolicySide(rollout, "b")
    side.set_train_parallel_config({"dp_size": 1})
    side.updatable_engines(suspicious=True)
    side.weights_updated(4)
    side.probe_tokens()
    side.check_policy([1], [0.5])
    side.check()
    assert rollout.mock_calls == [
        call.set_train_parallel_config({"dp_size": 1}, "b"),
        call.updatable_engines(True, "b"),
        call.weights_updated(4, "b"),
        call.probe_tokens("b"),
        call.check_policy([1], [0.5], None, "b"),
        call.check(),
    ]


class Rows:
    def __init__(self) -> None:
        self.rows: list[Any] = []

    def write(self, axis: str, step: int, metrics: Any) -> None:
        self.rows.append((axis, step, dict(metrics)))

    def close(self) -> None:
        return


def test_metrics_say_whose_they_are_and_steps_are_each_policy_s_own() -> None:
    sink = Rows()
    run = RunLog(Tracker([sink]))
    logs = [PolicyLog(run, name) for name in "ab"]
    run.rollout(4, {"rollout/raw_reward": 1.0})
    logs[0].go_on_after(8)
    for log, losses in zip(logs, ([0.5, 0.25], [0.75]), strict=True):
        train = [{"train/loss": loss} for loss in losses]
        log.train(4, {"train": train, "rollout": {"rollout/kl": 0.0}, "perf": {"perf/train_time": 2.0}})
        log.count("update_weights_wire_bytes", 100)
    assert sink.rows == [
        ("rollout", 4, {"rollout/step": 4, "rollout/raw_reward": 1.0}),
        ("train", 8, {"train/a/loss": 0.5, "train/step": 8}),
        ("train", 9, {"train/a/loss": 0.25, "train/step": 9}),
        ("rollout", 4, {"rollout/a/kl": 0.0, "perf/a/train_time": 2.0}),
        ("train", 0, {"train/b/loss": 0.75, "train/step": 0}),
        ("rollout", 4, {"rollout/b/kl": 0.0, "perf/b/train_time": 2.0}),
    ]
    run.end_step(4)
    ended = sink.rows[-1][2]
    sent = {name: ended[f"perf/{name}update_weights_wire_bytes"] for name in ("", "a/", "b/")}
    assert sent == {"": 200, "a/": 100, "b/": 100}
    assert [log.trained_steps for log in logs] == [10, 1]


def test_trainers_leave_their_gpus_as_the_flags_say(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    monkeypatch.setattr(setup, "RayTrainGroup", lambda *_, needs_offload: made.append(needs_offload))
    each = {name: run_args(offload_train=offloads) for name, offloads in (("a", True), ("b", False))}
    config = config_with(trained_policies=each, offload_train=True)
    setup._actor(config, MagicMock(), MagicMock(), RunLog(Tracker([])))
    assert made == [True, False]


def test_a_step_that_goes_wrong_is_told_with_its_policy(caplog: pytest.LogCaptureFixture) -> None:
    tracker = Tracker([*silent_steps("ab")])
    logs = [PolicyLog(RunLog(tracker), name) for name in "ab"]
    for rollout in range(2):  # told once, though rows of the other policy come between
        for log, gap in zip(logs, (0.01, 0.2), strict=True):
            log.train(rollout, {"train": [{"train/train_rollout_logprob_abs_diff": gap}]})
    (text,) = caplog.messages
    assert text.startswith("policy b: step 1: trainer and engines are 0.2 nats per token apart")


def test_steps_of_one_model_are_told_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    log = RunLog(Tracker([*silent_steps({})]))
    log.train(0, {"train": [{"train/train_rollout_logprob_abs_diff": 0.2}]})
    (text,) = caplog.messages
    assert text.startswith("step 1: trainer and engines are 0.2")
