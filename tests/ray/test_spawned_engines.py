"""What the actors of a group are told."""

import os
import signal
import threading
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from slime.config.run import RunConfig
from slime.processes.stopped import is_running
from slime.ray import spawned_engines, waiting
from slime.ray.local_start import start_ray
from slime.ray.process_watch import ProcessWatch
from slime.ray.spawned_engines import EngineActor, EngineShape, SpawnedEngine, SpawnedEngines
from slime.ray.waiting import wait_one
from tests.run_args import config_with

pytestmark = pytest.mark.slow


class Slots:
    """Four slots, on GPUs 4 to 7."""

    gpu_ids = (4, 5, 6, 7)

    def __len__(self) -> int:
        return len(self.gpu_ids)

    def strategy(self, slot: int) -> str:
        return f"bundle {slot}"


class Asked:
    """In place of an engine actor: which method was asked for."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        return repr(self) == repr(other)

    def __getattr__(self, method: str) -> "Asked":
        return Asked(f"{self.name}.{method}")

    def remote(self, *arguments: Any) -> "Asked":
        return self


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What Ray was asked for, an entry for each actor."""
    asked: list[dict[str, Any]] = []

    class Remote:
        def __init__(self, cls: type) -> None:
            assert cls is EngineActor

        def options(self, **options: Any) -> "Remote":
            asked.append({"strategy": options["scheduling_strategy"]})
            return self

        def remote(self, args: Namespace, rank: int, shape: EngineShape, **arguments: Any) -> Asked:
            asked[-1] |= {"args": args, "rank": rank, "shape": shape, **arguments}
            return Asked(f"actor {rank}.{arguments['part']}")

    monkeypatch.setattr(spawned_engines.ray, "remote", Remote)
    return asked


def told(config: RunConfig) -> Namespace:
    """What an engine actor gets of it."""
    return spawned_engines._plain(config.flat)


@pytest.mark.parametrize(
    ("colocate", "trainer_gpus", "first_slot", "offsets"),
    [
        (True, 4, 0, [0, 2]),
        (True, 2, 0, [0, None]),
        (True, 4, 2, [2, None]),
        (False, 4, 0, [None, None]),
    ],
    ids=["colocated", "half colocated", "colocated, a later group", "disaggregated"],
)
def test_each_engine_is_kept_beside_its_first_gpu(
    launched: list[dict[str, Any]],
    colocate: bool,
    trainer_gpus: int,
    first_slot: int,
    offsets: list[int | None],
) -> None:
    shape = EngineShape(2, "regular", {"dtype": "bfloat16"})
    config = config_with(colocate=colocate, rollout_engine="sglang")
    slots: Any = Slots()
    source = SpawnedEngines(config, slots, shape, first_slot, trainer_gpus)
    assert len(source) == 2
    actors = [source.launch(place, 10 + place).actors for place in range(2)]
    assert actors == [[Asked("actor 10.0")], [Asked("actor 11.0")]]
    assert launched == [
        {
            "args": told(config),
            "strategy": f"bundle {2 * place}",
            "rank": 10 + place,
            "shape": shape,
            "gpu_offset": offsets[place],
            "base_gpu_id": 4 + 2 * place,
            "part": 0,
            "parts": 1,
            "engine": "sglang",
        }
        for place in range(2)
    ]


def test_an_engine_over_two_nodes_has_an_actor_on_each_and_the_first_says_where_they_meet(
    launched: list[dict[str, Any]],
) -> None:
    config = config_with(num_gpus_per_node=2)
    slots: Any = Slots()
    source = SpawnedEngines(config, slots, EngineShape(4))
    assert len(source) == 1
    engine = source.launch(0, 3)
    assert engine.actors == [Asked("actor 3.0"), Asked("actor 3.1")]
    first, second = launched
    assert (first["strategy"], second["strategy"]) == ("bundle 0", "bundle 2")
    assert (first["base_gpu_id"], second["base_gpu_id"]) == (4, 6)
    assert (first["part"], second["part"], second["parts"]) == (0, 1, 2)
    assert "meeting_point" not in first
    assert second["meeting_point"] == Asked("actor 3.0.meeting_point")


def test_an_option_of_the_server_is_never_left_out(launched: list[dict[str, Any]]) -> None:
    config = config_with(sglang_download_dir=Path("models"), sglang_stages={2, 1}, params_dtype=torch.float32)
    slots: Any = Slots()
    SpawnedEngines(config, slots, EngineShape(2)).launch(0, 0)
    args = launched[0]["args"]
    assert (args.sglang_download_dir, args.sglang_stages) == (Path("models"), {2, 1})
    assert not hasattr(args, "params_dtype")


def test_an_engine_actor_imports_no_torch_by_what_it_is_told(launched: list[dict[str, Any]]) -> None:
    options = {"sglang_lora_paths": ["a", {"b": 1}], "sglang_api_key": None}
    plain = config_with(**options, fp32=True, bf16=False, seed=1.5)
    heavy = config_with(
        **vars(plain.flat), params_dtype=torch.float32, models=[EngineShape(1)], own={1: Path()}
    )
    slots: Any = Slots()
    SpawnedEngines(heavy, slots, EngineShape(4)).launch(0, 0)
    assert launched[0]["args"] == told(plain)


def test_the_death_of_any_part_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {"a.failure_reason": None, "b.failure_reason": "killed by SIGKILL"}
    monkeypatch.setattr(spawned_engines, "wait_one", lambda ref, *_: reasons[ref.name])
    engine = SpawnedEngine(0, [Asked("a"), Asked("b")])
    assert engine.failure_reason() == "its part on node 1: killed by SIGKILL"
    reasons["b.failure_reason"] = None
    assert engine.failure_reason() is None
    assert SpawnedEngine(0, [Asked("a")]).failure_reason() is None


def test_all_parts_are_waited_for_and_the_first_one_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []

    def wait_all(refs: list[Asked], *_: Any) -> list[str]:
        waited.extend(ref.name for ref in refs)
        return [f"endpoint of {ref.name[0]}" for ref in refs]

    monkeypatch.setattr(spawned_engines, "wait_all", wait_all)
    source = SpawnedEngines(config_with(), Slots(), EngineShape(4))  # type: ignore[arg-type]
    engines = [SpawnedEngine(0, [Asked("a"), Asked("b")]), SpawnedEngine(1, [Asked("c"), Asked("d")])]
    assert source.wait_ready(engines, 5) == ["endpoint of a", "endpoint of c"]
    assert waited == [f"{name}.wait_ready" for name in "abcd"]


@pytest.mark.cluster
def test_an_engine_that_is_still_starting_or_stopped_is_looked_at_and_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Starting:
        """By value, since Ray's processes do not find this module."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self._ended = threading.Event()

        def wait_ready(self, timeout: float) -> bool:
            return self._ended.wait(timeout)

        def failure_reason(self) -> None:
            return None

        def process_location(self) -> tuple[str, int]:
            return ray.get_runtime_context().get_node_id(), os.getpid()

        def shutdown(self) -> None:
            self._ended.set()

    class Anywhere(Slots):
        def strategy(self, slot: int) -> str:
            return "DEFAULT"

    monkeypatch.setattr(spawned_engines, "EngineActor", Starting)
    monkeypatch.setattr(spawned_engines, "ANSWER_TIMEOUT", 120.0)
    options = {"num_cpus": 2, "num_gpus": 1, "include_dashboard": False, "log_to_driver": False}
    start_ray(300.0, lambda: ray.init(address="local", **options))
    try:
        engine = SpawnedEngines(config_with(), Anywhere(), EngineShape(1)).launch(0, 0)  # type: ignore[arg-type]
        started = engine.actors[0].wait_ready.remote(300)
        assert engine.failure_reason() is None
        engine.actors[0].shutdown.remote()
        assert wait_one(started, "its start", 120)
        engine.end()

        monkeypatch.setattr(waiting, "_LOOK_INTERVAL", 0.2)
        monkeypatch.setattr(ProcessWatch.__init__, "__defaults__", (1.0,))
        stopped = SpawnedEngines(config_with(), Anywhere(), EngineShape(1)).launch(0, 0)  # type: ignore[arg-type]
        _, pid = wait_one(stopped.actors[0].process_location.remote(), "its start", 120)
        os.kill(pid, signal.SIGSTOP)
        reason = stopped.failure_reason()
        assert reason is not None
        assert reason.startswith(f"its engine actor (process {pid}) is stopped (SIGSTOP)")
        stopped.end()  # it does not wait for an answer
        deadline = time.monotonic() + 60
        while is_running(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_running(pid)
    finally:
        ray.shutdown()
