"""Engines that we start ourselves: each has a keeper, a Ray actor on its node that owns its process."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from slime.arguments.views import FleetView
from slime.backends.sglang_utils.server_engine import EnginePlacement
from slime.backends.sglang_utils.servers import ENGINES
from slime.ray.node import first_port, log_dir, node_host, process_env
from slime.ray.placement_group import Slots
from slime.ray.waiting import DeadlineExceeded, ProcessDied, wait_all, wait_one
from slime.utils.http_utils import find_available_port, wrap_ipv6
from slime.utils.types import EngineEndpoint

logger = logging.getLogger(__name__)

PORTS = (15000, 12000)  # below the kernel's range for outgoing connections, 32768 and up
ANSWER_TIMEOUT = 30.0  # seconds that a keeper may take to answer
_MEETING_PORTS = 32  # in a row, of which SGLang takes some more the more data-parallel ranks it has
CALLS_AT_ONCE = 4  # one that waits for a slow start must not keep others from looking at it or ending it


@dataclass(frozen=True)
class EngineShape:
    """What the engines of a group have in common.

    Attributes:
        num_gpus: of one engine.
        kind: "regular", "prefill" or "decode".
        overrides: option values of the server, instead of those of ``--sglang-*``.
    """

    num_gpus: int
    kind: str = "regular"
    overrides: Mapping[str, Any] = field(default_factory=dict)


class EngineKeeper:
    """Launches one HTTP server process, or one node's part of one, and answers for its life.

    Args:
        part: which part of an engine over ``parts`` nodes.
        meeting_point: where the parts find each other, as part 0 says.
    """

    def __init__(
        self,
        args: FleetView,
        rank: int,
        shape: EngineShape,
        gpu_offset: int | None,
        base_gpu_id: int,
        part: int = 0,
        parts: int = 1,
        meeting_point: str | None = None,
    ) -> None:
        # Ports of neighbours on a node start far apart, or two engines could pick the same one.
        port = find_available_port(first_port(*PORTS) + 40 * rank)
        host = node_host()
        if parts > 1 and meeting_point is None:
            meeting_point = f"{wrap_ipv6(host)}:{find_available_port(port + 20, _MEETING_PORTS)}"
        placement = EnginePlacement(
            rank=rank,
            host=host,
            port=port,
            nccl_port=find_available_port(port + 10),
            num_gpus=shape.num_gpus,
            base_gpu_id=base_gpu_id,
            gpu_offset=gpu_offset,
            num_nodes=parts,
            node_rank=part,
            dist_init_addr=meeting_point,
            api_key=args.sglang_api_key,
            worker_type=shape.kind,
            bootstrap_port=find_available_port(port + 5) if shape.kind == "prefill" else None,
        )
        self._engine = ENGINES[args.rollout_engine](args, placement, log_dir(), shape.overrides)
        self._engine.launch()

    def meeting_point(self) -> str | None:
        """Where the other parts of this engine find this one; None if it has no others."""
        return self._engine.placement.dist_init_addr

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
    """An engine as its keepers tell of it: one on each of its nodes, that of part 0 first."""

    def __init__(self, rank: int, keepers: Sequence[Any]) -> None:
        self.rank, self.keepers = rank, list(keepers)

    def failure_reason(self) -> str | None:
        refs = [keeper.failure_reason.remote() for keeper in self.keepers]
        for part, ref in enumerate(refs):
            try:
                reason = wait_one(ref, f"life of engine {self.rank}", ANSWER_TIMEOUT)
            except (ProcessDied, DeadlineExceeded) as error:
                reason = f"its keeper is gone: {error}"
            if reason is not None:
                return reason if len(refs) == 1 else f"its part on node {part}: {reason}"
        return None

    def updated(self, version: str) -> None:
        """Its process cannot become another one unseen."""

    def end(self) -> None:
        refs = [keeper.shutdown.remote() for keeper in self.keepers]
        for ref in refs:
            try:
                wait_one(ref, f"end of engine {self.rank}", ANSWER_TIMEOUT)
            except (ray.exceptions.RayError, DeadlineExceeded, ProcessDied) as error:
                logger.warning("engine %d did not shut down by itself: %s", self.rank, error)
        for keeper in self.keepers:
            ray.kill(keeper)


class SpawnedEngines:
    """A source of engines of our own.

    Args:
        slots: the group's.
        first_slot: the number of the first of them among all slots of the engines.
        trainer_gpus: how many of all slots, from the first on, belong to the trainer too if colocated.
    """

    replaces = True

    def __init__(
        self, args: FleetView, slots: Slots, shape: EngineShape, first_slot: int = 0, trainer_gpus: int = 0
    ) -> None:
        self._args, self._slots, self._shape = args, slots, shape
        self._first_slot, self._trainer_gpus = first_slot, trainer_gpus

    def can_fill(self, place: int) -> bool:
        """Its GPUs are free again once an engine is gone."""
        return True

    def __len__(self) -> int:
        return len(self._slots) // self._shape.num_gpus

    def launch(self, place: int, rank: int) -> SpawnedEngine:
        """Starts a keeper beside the engine's first GPU on each node; each launches its server at once."""
        first, per_node = place * self._shape.num_gpus, self._args.num_gpus_per_node
        parts = max(1, self._shape.num_gpus // per_node)
        keepers: list[Any] = []
        for part in range(parts):
            # Ray starts the others once the first has answered.
            options = {"meeting_point": keepers[0].meeting_point.remote()} if part else {}
            keepers.append(self._keep(rank, first + part * per_node, first, part, parts, **options))
        return SpawnedEngine(rank, keepers)

    def _keep(self, rank: int, slot: int, first: int, part: int, parts: int, **options: Any) -> Any:
        offset = self._first_slot + first
        return (
            ray.remote(EngineKeeper)
            .options(
                num_gpus=0.2,
                num_cpus=0.2,
                max_concurrency=CALLS_AT_ONCE,
                scheduling_strategy=self._slots.strategy(slot),
                runtime_env={"env_vars": process_env()},
            )
            .remote(
                self._args,
                rank,
                self._shape,
                gpu_offset=offset if self._args.colocate and offset < self._trainer_gpus else None,
                base_gpu_id=self._slots.gpu_ids[slot],
                part=part,
                parts=parts,
                **options,
            )
        )

    def wait_ready(self, handles: Sequence[SpawnedEngine], timeout: float) -> list[EngineEndpoint]:
        """Where the engines serve; all their parts have started then."""
        parts = [[keeper.wait_ready.remote(timeout) for keeper in handle.keepers] for handle in handles]
        refs = [ref for own in parts for ref in own]
        answers = wait_all(refs, "start of the rollout engines", timeout + ANSWER_TIMEOUT)
        return [answers[refs.index(own[0])] for own in parts]
