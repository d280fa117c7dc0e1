"""What the rollout manager tells user code about the run."""

import sys
from argparse import Namespace
from typing import Any

import pytest

from slime.ray import fleet
from slime.ray.rollout_manager import RolloutManager

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


def exiting_fn(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> list[Any]:
    sys.exit(3)


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    seen.clear()
    monkeypatch.setattr(fleet, "node_host", lambda: "10.0.0.7")
    monkeypatch.setattr(fleet, "first_port", lambda base, spread: base)
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
        rollout_timeout=10,
        use_fault_tolerance=False,
        rollout_health_check_interval=1.0,
        rollout_health_check_timeout=1.0,
        rollout_health_check_first_wait=0.0,
        sglang_router_ip=None,
        sglang_router_port=None,
        sglang_api_key=None,
    )


def test_data_source_and_rollout_function_know_router_and_key(flags: dict[str, Any]) -> None:
    manager = RolloutManager(Namespace(**flags), range(1), 0)  # type: ignore[arg-type]
    manager._samples(0)
    source, function = seen
    for args in (source, function):
        assert args.sglang_model_routers == {"default": (args.sglang_router_ip, args.sglang_router_port)}
        assert args.sglang_router_ip == "10.0.0.7" and args.sglang_router_port >= 3000
        assert len(args.sglang_api_key) >= 32
    assert source.sglang_api_key == function.sglang_api_key


def test_a_rollout_function_that_exits_is_an_error_of_the_rollout(
    flags: dict[str, Any],
) -> None:
    flags["rollout_function_path"] = f"{__name__}.exiting_fn"
    manager = RolloutManager(Namespace(**flags), [], 0)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"rollout 0: its function called sys\.exit\(3\)"):
        manager._samples(0)


def test_the_length_of_the_data_settles_the_number_of_rollouts(flags: dict[str, Any]) -> None:
    args = Namespace(**flags)
    manager = RolloutManager(args, [], 0)  # type: ignore[arg-type]
    assert manager.num_rollout_per_epoch() == 2
    assert manager.num_rollout() == 6
    manager._samples(0)
    assert seen[-1].num_rollout == 6
    assert args.num_rollout is None


def test_data_that_fills_no_rollout_settles_nothing(flags: dict[str, Any]) -> None:
    manager = RolloutManager(Namespace(**{**flags, "rollout_batch_size": 16}), [], 0)  # type: ignore[arg-type]
    assert manager.num_rollout() is None
    settled = RolloutManager(Namespace(**{**flags, "num_rollout": 5}), [], 0)  # type: ignore[arg-type]
    assert settled.num_rollout() == 5
