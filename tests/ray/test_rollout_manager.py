"""What the rollout manager tells user code about the run."""

import errno
import sys
from argparse import Namespace
from collections import Counter
from typing import Any, ClassVar

import pytest

from slime.arguments.validate.served_models import ModelConfig, ServerGroupConfig
from slime.observability import logging_utils, silent_rollouts
from slime.ray import addresses, rollout_manager
from slime.ray.fleet import Fleet
from slime.ray.rollout_manager import RolloutManager
from slime.rollout.base_types import RolloutFnEvalOutput
from slime.rollout.data_state import data_metrics
from slime.rollout.ledger import Ledger
from slime.utils.types import Sample
from tests.run_args import config_with, run_args

seen: list[Namespace] = []


class Source:
    """A data source of ten prompts."""

    def __init__(self, args: Namespace) -> None:
        seen.append(args)

    def __len__(self) -> int:
        return 10


def rollout_fn(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> list[Any]:
    seen.append(args)
    return []


def evaluation_fn(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    samples = [Sample(index=i, group_index=i, rollout_id=7) for i in range(3)]
    return RolloutFnEvalOutput(data={"held_out": {"rewards": [1.0] * 3, "samples": samples}})


def grouped_fn(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> list[Any]:
    groups = [[Sample(index=i) for i in range(3)], [Sample(index=i) for i in (3, 4)]]
    seen[:] = [*groups[0], *groups[1]]  # type: ignore[list-item]
    return groups


def say_nothing(*_: Any) -> bool:
    logging_utils.log(None, {"rollout/own": 0.5, "rollout/step": 0}, step_key="rollout/step")
    return True


def keep(rollout_id: int, args: Namespace, data: dict[str, Any], extra_metrics: Any) -> bool:
    seen.append(data)  # type: ignore[arg-type]
    logging_utils.log(args, {"eval/own": 0.25}, step_key="eval/step")
    return True


def exiting_fn(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> list[Any]:
    sys.exit(3)


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    seen.clear()
    monkeypatch.setattr(addresses, "node_host", lambda: "10.0.0.7")
    monkeypatch.setattr(addresses, "first_port", lambda base, spread: base)
    return dict(
        rollout_function_path=f"{__name__}.rollout_fn",
        eval_function_path=f"{__name__}.rollout_fn",
        data_source_path=f"{__name__}.Source",
        rollout_global_dataset=True,
        rollout_batch_size=4,
        rollout_num_gpus_per_engine=1,
        num_rollout=None,
        num_epoch=3,
        load_debug_rollout_data=None,
        rollout_timeout=600,
        use_fault_tolerance=False,
        debug_rollout_only=False,
        rollout_health_check_interval=1.0,
        rollout_health_check_timeout=1.0,
        rollout_health_check_first_wait=0.0,
        rollout_engine_hang_timeout=300.0,
        sglang_router_ip=None,
        sglang_router_port=None,
        sglang_api_key=None,
        rollout_external=False,
        router_external=False,
        offload_rollout=False,
        served_models=[],
    )


def model(name: str, num_gpus: int, **options: Any) -> ModelConfig:
    groups = [ServerGroupConfig("regular", num_gpus, 1)]
    return ModelConfig(name, server_groups=groups, **options)


class Slots:
    """Any slots: nothing is started on them."""

    def __len__(self) -> int:
        return 1

    def slice(self, start: int, stop: int) -> "Slots":
        return self


def test_data_source_and_rollout_function_know_router_and_key(flags: dict[str, Any]) -> None:
    flags["served_models"] = [model("policy", 1, update_weights=True), model("judge", 1)]
    manager = RolloutManager(config_with(**flags), Slots(), 0)  # type: ignore[arg-type]
    manager._samples(0)
    source, function = seen
    for args in (source, function):
        policy, judge = args.sglang_model_routers.items()
        assert policy == ("policy", (args.sglang_router_ip, args.sglang_router_port))
        assert judge[0] == "judge" and judge[1][1] > args.sglang_router_port
        assert args.sglang_router_ip == "10.0.0.7" and args.sglang_router_port >= 3000
        assert len(args.sglang_api_key) >= 32
    assert source.sglang_api_key == function.sglang_api_key


def test_a_rollout_function_that_exits_is_an_error_of_the_rollout(
    flags: dict[str, Any],
) -> None:
    flags["rollout_function_path"] = f"{__name__}.exiting_fn"
    manager = RolloutManager(config_with(**flags), [], 0)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"rollout 0: its function called sys\.exit\(3\)"):
        manager._samples(0)


def test_the_length_of_the_data_settles_the_number_of_rollouts(flags: dict[str, Any]) -> None:
    config = config_with(**flags)
    manager = RolloutManager(config, [], 0)  # type: ignore[arg-type]
    assert manager.num_rollout_per_epoch() == 2
    assert manager.num_rollout() == 6
    manager._samples(0)
    assert seen[-1].num_rollout == 6
    assert config.data.num_rollout is None


def test_data_that_fills_no_rollout_settles_nothing(flags: dict[str, Any]) -> None:
    manager = RolloutManager(config_with(**{**flags, "rollout_batch_size": 16}), [], 0)  # type: ignore[arg-type]
    assert manager.num_rollout() is None
    settled = RolloutManager(config_with(**{**flags, "num_rollout": 5}), [], 0)  # type: ignore[arg-type]
    assert settled.num_rollout() == 5


class Booked(Source):
    """A data source with books and with something to say."""

    notices: ClassVar = ["3 of 13 prompts are too long"]

    def __init__(self, args: Namespace) -> None:
        super().__init__(args)
        self.ledger = Ledger(issued=4, trained=4)

    def data_metrics(self) -> dict[str, int]:
        return {"rollout/dropped/prompts_too_long": 3}


def left_out_of(flags: dict[str, Any], trained: list[int], **overrides: Any) -> tuple[Any, Any]:
    """Metrics and books after a rollout of three groups of two samples each, of which some are trained."""
    flags |= dict(data_source_path=f"{__name__}.Booked", global_batch_size=2, **overrides)
    manager = RolloutManager(config_with(**flags), [], 0)  # type: ignore[arg-type]
    samples = [Sample(group_index=i // 2) for i in range(6)]
    batch = {"tokens": [[0]] * 6, "rollout_ids": [0, 1, 2, 3, 4, 4]}
    metrics = manager._policies["default"].book_left_out(
        samples, batch, [{"partition": trained}], manager._data_source
    )
    return metrics, manager._data_source.ledger


def test_rollouts_that_fill_no_step_are_counted_and_their_groups_dropped(flags: dict[str, Any]) -> None:
    metrics, ledger = left_out_of(flags, [0, 1, 3])
    # Group 1 is trained in part; of group 2 nothing is, and its samples are one rollout.
    assert metrics == {"rollout/dropped/no_step": 2}
    assert ledger == Ledger(issued=4, trained=3, dropped=Counter(no_step=1))


def test_a_rollout_that_is_trained_whole_changes_no_books(flags: dict[str, Any]) -> None:
    assert left_out_of(flags, [0, 1, 2, 3, 4, 5]) == ({}, Ledger(issued=4, trained=4))


def test_a_recording_changes_no_books(flags: dict[str, Any]) -> None:
    metrics, ledger = left_out_of(flags, [0], load_debug_rollout_data="dump/{rollout_id}.pt")
    assert metrics == {"rollout/dropped/no_step": 4} and not ledger.dropped


def test_what_is_to_be_said_about_the_data_is_passed_on(flags: dict[str, Any]) -> None:
    booked = RolloutManager(config_with(**{**flags, "data_source_path": f"{__name__}.Booked"}), [], 0)  # type: ignore[arg-type]
    assert booked.notices() == ["3 of 13 prompts are too long"]
    told = data_metrics(booked._data_source)
    assert told["rollout/dropped/prompts_too_long"] == 3 and told["rollout/ledger/trained"] == 4
    silent = RolloutManager(config_with(**flags), [], 0)  # type: ignore[arg-type]
    assert (silent.notices(), data_metrics(silent._data_source)) == ([], {})


class OnFullDisk(Source):
    """Whose state finds no room after the first rollout."""

    def save(self, rollout_id: int) -> None:
        if rollout_id:
            raise OSError(errno.ENOSPC, "No space left on device", "state.pt")


def test_a_position_in_the_data_that_finds_no_room_is_told_with_its_rollout(flags: dict[str, Any]) -> None:
    own = dict(data_source_path=f"{__name__}.OnFullDisk", save="/saved", save_interval=1)
    manager = RolloutManager(config_with(**{**flags, **own}), [], 0)  # type: ignore[arg-type]
    assert manager._save_state(0) is None
    told = manager._save_state(1)
    assert (
        told is not None and "position in the data" in told and "No space left on device: 'state.pt'" in told
    )


def test_rollout_ids_may_repeat_in_an_evaluation_on_which_nothing_trains(flags: dict[str, Any]) -> None:
    own = dict(eval_function_path=f"{__name__}.evaluation_fn", save_debug_rollout_data=None)
    log = f"{__name__}.keep"
    flags |= own | {"custom_eval_rollout_log_function_path": log, "partial_rollout": False}
    metrics, _ = RolloutManager(config_with(**flags), [], 0).eval(0)  # type: ignore[arg-type]
    assert metrics.keys() == {"perf/eval_time", "eval/own"} and metrics["eval/own"] == 0.25
    assert len(seen[-1]["held_out"]["samples"]) == 3  # type: ignore[index]


GROUPED = {
    "rollout_function_path": f"{__name__}.grouped_fn",
    "custom_rollout_log_function_path": f"{__name__}.say_nothing",
    "n_samples_per_prompt": 2,
    "save_debug_rollout_data": None,
    "trace": None,
    "save": None,
    "partial_rollout": False,
}


def test_lists_of_a_rollout_function_are_its_groups_where_it_names_none(flags: dict[str, Any]) -> None:
    flags |= GROUPED | {"loss_type": "sft_loss"}
    told: Any = RolloutManager(config_with(**flags), [], 0).generate(0)  # type: ignore[arg-type]
    assert told.metrics["rollout/own"] == 0.5 and "rollout/step" not in told.metrics
    assert told.spans == [] and told.data_state is None
    assert [sample.group_index for sample in seen] == [0, 0, 0, 1, 1]


def test_rates_are_of_the_gpus_that_engines_have_when_the_rollout_begins(
    flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []
    monkeypatch.setattr(rollout_manager, "rollout_log_metrics", lambda *told: given.append(told[-1]) or {})
    for gpus in (3, 0):
        monkeypatch.setattr(Fleet, "gpus", gpus)
        RolloutManager(config_with(**flags | GROUPED), [], 0).generate(0)  # type: ignore[arg-type]
    assert given == [3, None]


def test_a_row_of_rollouts_with_equal_rewards_is_told_once(
    flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags |= GROUPED
    found = iter(["flat", "flat", None, "flat again"])
    monkeypatch.setattr(silent_rollouts, "LOOKS", (lambda config, samples: next(found),))
    manager = RolloutManager(config_with(**flags), [], 0)  # type: ignore[arg-type]
    assert [manager.generate(i).warnings for i in range(4)] == [["flat"], [], [], ["flat again"]]


class Counting(Source):
    """A data source that tells how many rollouts it has given prompts to."""

    rollouts = 0

    def state_dict(self) -> dict[str, Any]:
        return {"rollouts": self.rollouts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rollouts = state["rollouts"]


def counting_fn(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> list[Any]:
    data_source.rollouts += 1
    return [[Sample(index=0), Sample(index=1)]]


def test_another_manager_goes_on_from_where_the_data_was_after_a_rollout(flags: dict[str, Any]) -> None:
    flags |= GROUPED | {"data_source_path": f"{__name__}.Counting", "use_fault_tolerance": True}
    flags["rollout_function_path"] = f"{__name__}.counting_fn"
    first, second = (RolloutManager(config_with(**flags), [], 0) for _ in range(2))  # type: ignore[arg-type]
    assert first.data_state() == {"rollouts": 0}
    states = [first.generate(rollout_id).data_state for rollout_id in range(2)]
    assert states == [{"rollouts": 1}, {"rollouts": 2}]
    second.restore(states[0])  # type: ignore[arg-type]
    assert second.generate(1).data_state == states[1]


@pytest.mark.parametrize(("source", "tolerant"), [("Source", True), ("Counting", False)])
def test_none_does_where_nobody_asked_or_the_data_source_does_not_tell(
    flags: dict[str, Any], source: str, tolerant: bool
) -> None:
    flags |= {"data_source_path": f"{__name__}.{source}", "use_fault_tolerance": tolerant}
    assert RolloutManager(config_with(**flags), [], 0).data_state() is None  # type: ignore[arg-type]


def test_of_several_policies_each_reward_is_the_one_of_the_conversion(flags: dict[str, Any]) -> None:
    each = {name: run_args(policy_name=name) for name in ("a", "b")}
    manager = RolloutManager(config_with(**flags, trained_policies=each), [], 0)  # type: ignore[arg-type]
    for own in manager._policies.values():
        own.to_train_shards = lambda *_: ([{}], {"rollout/raw_reward": 2.0})  # type: ignore[method-assign]
        own.metrics = lambda _: {"rollout/raw_reward": 1.0, "rollout/n": 1}  # type: ignore[method-assign]
    shards, metrics = manager._policies.to_train_shards({"a": [], "b": []}, None)
    assert len(shards) == 2
    assert metrics == {
        f"rollout/{of}/{name}": value for of in "ab" for name, value in (("raw_reward", 2.0), ("n", 1))
    }
