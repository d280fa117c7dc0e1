"""Engines that we start ourselves: each has a keeper, a Ray actor on its node that owns its process."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from slime.arguments.views import FleetView
from slime.backends.sglang_utils.server_engine import EnginePlacement
from slime.backends.sglang_utils.servers import ENGINES
from slime.ray.node import first_port, log_dir, node_host, process_env
from slime.ray.placement_group import Slots
from slime.ray.waiting import DeadlineExceeded, ProcessDied, wait_all, wait_one
from slime.utils.http_utils import find_available_port
from slime.utils.types import EngineEndpoint

logger = logging.getLogger(__name__)

PORTS = (15000, 12000)  # below the kernel's range for outgoing connections, 32768 and up
ANSWER_TIMEOUT = 30.0  # seconds that a keeper may take to answer
CALLS_AT_ONCE = 4  # one that waits for a slow start must not keep others from looking at it or ending it


class EngineKeeper:
    """Launches one HTTP server process and answers for its life."""

    def __init__(
        self,
        args: FleetView,
        rank: int,
        gpu_offset: int | None,
        base_gpu_id: int,
        overrides: Mapping[str, Any],
    ) -> None:
        # Ports of neighbours on a node start far apart, or two engines could pick the same one.
        port = find_available_port(first_port(*PORTS) + 40 * rank)
        placement = EnginePlacement(
            rank=rank,
            host=node_host(),
            port=port,
            nccl_port=find_available_port(port + 10),
            num_gpus=args.rollout_num_gpus_per_engine,
            base_gpu_id=base_gpu_id,
            gpu_offset=gpu_offset,
            api_key=args.sglang_api_key,
        )
        self._engine = ENGINES[args.rollout_engine](args, placement, log_dir(), overrides)
        self._engine.launch()

    def wait_ready(self, timeout: float) -> EngineEndpoint:
        """Where it serves, once it does; ``timeout`` in seconds."""
        self._engine.wait_ready(timeout)
        return self._engine.endpoint

    def failure_reason(self) -> str | None:
        """None while the server lives, else why it ended, with its last log lines."""
        return self._engine.failure_reason()

    def shutdown(self) -> None:
        self._engine.shutdown()


class SpawnedEngine:
    """An engine as its keeper tells of it."""

    def __init__(self, rank: int, keeper: Any) -> None:
        self.rank, self.keeper = rank, keeper

    def failure_reason(self) -> str | None:
        ref = self.keeper.failure_reason.remote()
        try:
            return wait_one(ref, f"life of engine {self.rank}", ANSWER_TIMEOUT)
        except (ProcessDied, DeadlineExceeded) as error:
            return f"its keeper is gone: {error}"

    def end(self) -> None:
        try:
            wait_one(self.keeper.shutdown.remote(), f"end of engine {self.rank}", ANSWER_TIMEOUT)
        except (ray.exceptions.RayError, DeadlineExceeded, ProcessDied) as error:
            logger.warning("engine %d did not shut down by itself: %s", self.rank, error)
        ray.kill(self.keeper)


class SpawnedEngines:
    """A source of engines of our own, ``--rollout-num-gpus-per-engine`` slots each.

    Args:
        trainer_gpus: how many of the slots, from the first on, belong to the trainer too if colocated.
        overrides: option values of the server, instead of those of ``--sglang-*``.
    """

    replaces = True

    def __init__(
        self,
        args: FleetView,
        slots: Slots,
        trainer_gpus: int = 0,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        self._args, self._slots, self._trainer_gpus = args, slots, trainer_gpus
        self._overrides = dict(overrides or {})

    def __len__(self) -> int:
        return len(self._slots) // self._args.rollout_num_gpus_per_engine

    def launch(self, place: int, rank: int) -> SpawnedEngine:
        """Starts the keeper beside the engine's first GPU; it launches the server at once."""
        first = place * self._args.rollout_num_gpus_per_engine
        colocated = self._args.colocate and first < self._trainer_gpus
        keeper = (
            ray.remote(EngineKeeper)
            .options(
                num_gpus=0.2,
                num_cpus=0.2,
                max_concurrency=CALLS_AT_ONCE,
                scheduling_strategy=self._slots.strategy(first),
                runtime_env={"env_vars": process_env()},
            )
            .remote(
                self._args,
                rank,
                gpu_offset=first if colocated else None,
                base_gpu_id=self._slots.gpu_ids[first],
                overrides=self._overrides,
            )
        )
        return SpawnedEngine(rank, keeper)

    def wait_ready(self, handles: Sequence[SpawnedEngine], timeout: float) -> list[EngineEndpoint]:
        refs = [handle.keeper.wait_ready.remote(timeout) for handle in handles]
        return wait_all(refs, "start of the rollout engines", timeout + ANSWER_TIMEOUT)
