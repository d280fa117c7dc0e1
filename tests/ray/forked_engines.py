"""A rollout manager in this process, over engines that are forked: no Ray starts.

They take the place of those that Ray's actors keep; router, fleet, watch and manager are those of a run.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.config.run import run_config
from slime.ray import addresses, engine_watch, fleet_setup
from slime.ray.placement_group import Slots
from slime.ray.rollout_manager import RolloutManager
from slime.ray.spawned_engines import EngineShape
from slime.utils.types import EngineEndpoint
from tests.engines import free_port
from tests.engines.forked import ForkedEngine


class ForkedEngines:
    """A source of them, made as ``SpawnedEngines`` is."""

    log_dir: Path
    launched: list[ForkedEngine]

    def __init__(
        self, args: Any, slots: Slots, shape: EngineShape, first_slot: int, trainer_gpus: int
    ) -> None:
        self._model_path, self._places = shape.overrides["model_path"], len(slots)

    def can_fill(self, place: int) -> bool:
        return True

    def __len__(self) -> int:
        return self._places

    def launch(self, place: int, rank: int) -> ForkedEngine:
        log = self.log_dir / f"engine_{len(self.launched)}.log"
        self.launched.append(ForkedEngine(rank, self._model_path, log, blows=self.log_dir))
        return self.launched[-1]

    def wait_ready(self, handles: Sequence[ForkedEngine], timeout: float) -> list[EngineEndpoint]:
        for handle in handles:
            handle.wait_ready()
        return [handle.endpoint for handle in handles]


def manager_of(args: Any, monkeypatch: Any, log_dir: Path) -> RolloutManager:
    """A rollout manager in this process, over forked engines; the caller disposes of it."""
    ForkedEngines.log_dir, ForkedEngines.launched = log_dir, []
    monkeypatch.setattr(fleet_setup, "SpawnedEngines", ForkedEngines)
    monkeypatch.setattr(fleet_setup, "log_dir", lambda: log_dir)
    monkeypatch.setattr(addresses, "node_host", lambda: "127.0.0.1")
    monkeypatch.setattr(addresses, "first_port", lambda base, spread: free_port())
    monkeypatch.setattr(engine_watch, "LOOK_INTERVAL", 0.05)
    count = args.rollout_num_gpus
    slots = Slots(None, tuple(range(count)), tuple(range(count)), ("node",) * count)  # type: ignore[arg-type]
    return RolloutManager(run_config(args), slots, 0)
