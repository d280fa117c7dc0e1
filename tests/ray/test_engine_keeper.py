"""What the keepers of a group are told."""

import threading
from argparse import Namespace
from typing import Any

import pytest
import ray

from slime.ray import engine_keeper
from slime.ray.engine_keeper import EngineKeeper, SpawnedEngines
from slime.ray.waiting import wait_one


class Slots:
    """Four slots, on GPUs 4 to 7."""

    gpu_ids = (4, 5, 6, 7)

    def __len__(self) -> int:
        return len(self.gpu_ids)

    def strategy(self, slot: int) -> str:
        return f"bundle {slot}"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What Ray was asked for, an entry for each keeper."""
    asked: list[dict[str, Any]] = []

    class Remote:
        def __init__(self, cls: type) -> None:
            assert cls is EngineKeeper

        def options(self, **options: Any) -> "Remote":
            asked.append({"strategy": options["scheduling_strategy"]})
            return self

        def remote(self, args: Namespace, rank: int, **arguments: Any) -> str:
            asked[-1] |= {"rank": rank, **arguments}
            return f"keeper {rank}"

    monkeypatch.setattr(engine_keeper.ray, "remote", Remote)
    return asked


@pytest.mark.parametrize(
    ("colocate", "trainer_gpus", "offsets"),
    [(True, 4, [0, 2]), (True, 2, [0, None]), (False, 4, [None, None])],
    ids=["colocated", "half colocated", "disaggregated"],
)
def test_each_engine_is_kept_beside_its_first_gpu(
    launched: list[dict[str, Any]], colocate: bool, trainer_gpus: int, offsets: list[int | None]
) -> None:
    args = Namespace(rollout_num_gpus_per_engine=2, colocate=colocate)
    source = SpawnedEngines(args, Slots(), trainer_gpus, {"dtype": "bfloat16"})  # type: ignore[arg-type]
    assert len(source) == 2
    assert [source.launch(place, 10 + place).keeper for place in range(2)] == ["keeper 10", "keeper 11"]
    assert launched == [
        {
            "strategy": f"bundle {2 * place}",
            "rank": 10 + place,
            "gpu_offset": offsets[place],
            "base_gpu_id": 4 + 2 * place,
            "overrides": {"dtype": "bfloat16"},
        }
        for place in range(2)
    ]


@pytest.mark.cluster
def test_an_engine_that_is_still_starting_is_looked_at_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    class Starting:
        """By value, since Ray's processes do not find this module."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self._ended = threading.Event()

        def wait_ready(self, timeout: float) -> bool:
            return self._ended.wait(timeout)

        def failure_reason(self) -> None:
            return None

        def shutdown(self) -> None:
            self._ended.set()

    class Anywhere(Slots):
        def strategy(self, slot: int) -> str:
            return "DEFAULT"

    monkeypatch.setattr(engine_keeper, "EngineKeeper", Starting)
    monkeypatch.setattr(engine_keeper, "ANSWER_TIMEOUT", 20.0)
    args = Namespace(rollout_num_gpus_per_engine=1, colocate=False)
    ray.init(address="local", num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False)
    try:
        engine = SpawnedEngines(args, Anywhere()).launch(0, 0)  # type: ignore[arg-type]
        started = engine.keeper.wait_ready.remote(120)
        assert engine.failure_reason() is None
        engine.keeper.shutdown.remote()
        assert wait_one(started, "its start", 20)
        engine.end()
    finally:
        ray.shutdown()
