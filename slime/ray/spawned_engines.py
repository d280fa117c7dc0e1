"""Engines that this run starts: an engine actor, a Ray actor on the engine's node, owns each process."""

import logging
import threading
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray

from slime.config.fleet import FleetConfig
from slime.ray.engine_actor import EngineActor, EngineShape
from slime.ray.node import process_env, runtime_env
from slime.ray.placement_group import Slots
from slime.ray.process_watch import ProcessLocation, ProcessStopped, ProcessWatch
from slime.ray.waiting import DeadlineExceeded, ProcessDied, wait_all, wait_one
from slime.utils.types import EngineEndpoint

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT = 30.0  # seconds that an engine actor may take to answer
CALLS_AT_ONCE = 4  # one that waits for a slow start must not keep others from looking at it or ending it


class SpawnedEngine:
    """An engine as its actors tell of it: one on each of its nodes, that of part 0 first."""

    def __init__(self, rank: int, actors: Sequence[Any]) -> None:
        self.rank, self.actors = rank, list(actors)
        self._processes: list[ProcessLocation] = []
        self._watch: ProcessWatch | None = None  # there is none before an actor is slow to answer
        self._watching = threading.Lock()

    def failure_reason(self) -> str | None:
        refs = [actor.failure_reason.remote() for actor in self.actors]
        for part, ref in enumerate(refs):
            try:
                reason = wait_one(ref, f"life of engine {self.rank}", ANSWER_TIMEOUT, self._look)
            except ProcessStopped as error:
                reason = str(error)
            except (ProcessDied, DeadlineExceeded) as error:
                reason = f"its engine actor is gone: {error}"
            if reason is not None:
                return reason if len(refs) == 1 else f"its part on node {part}: {reason}"
        return None

    def _look(self) -> None:
        """Raises ProcessStopped if somebody has stopped one of the actors; from any thread."""
        with self._watching:
            if self._watch is None:
                self._watch = ProcessWatch()
                for actor in self.actors:
                    self._watch.add("its engine actor", actor)
            self._watch.check()

    def processes(self) -> list[ProcessLocation]:
        """Its servers' processes; none if they ended before they were asked."""
        if not self._processes:
            refs = [actor.server_location.remote() for actor in self.actors]
            with suppress(ProcessDied, ProcessStopped, DeadlineExceeded, ray.exceptions.RayError):
                self._processes = wait_all(
                    refs, f"processes of engine {self.rank}", ANSWER_TIMEOUT, self._look
                )
        return self._processes

    def updated(self, version: str) -> None:
        """Tells whether the engine was updated: its process cannot become another one unseen."""

    def end(self) -> None:
        refs = [actor.shutdown.remote() for actor in self.actors]
        for ref in refs:
            try:
                wait_one(ref, f"end of engine {self.rank}", ANSWER_TIMEOUT, self._look)
            except (ray.exceptions.RayError, DeadlineExceeded, ProcessDied, ProcessStopped) as error:
                logger.warning("engine %d did not shut down by itself: %s", self.rank, error)
        for actor in self.actors:
            ray.kill(actor)


class SpawnedEngines:
    """A source of engines of our own.

    Args:
        slots: the group's.
        first_slot: the number of the first of them among all slots of the engines.
        trainer_gpus: how many of all slots, from the first on, belong to the trainer too if colocated.
    """

    def __init__(
        self,
        config: FleetConfig,
        slots: Slots,
        shape: EngineShape,
        first_slot: int = 0,
        trainer_gpus: int = 0,
    ) -> None:
        self._config, self._slots, self._shape = config, slots, shape
        self._first_slot, self._trainer_gpus = first_slot, trainer_gpus

    def can_fill(self, place: int) -> bool:
        """Tells whether a place can be filled: its GPUs are free again once an engine is gone."""
        return True

    def __len__(self) -> int:
        return len(self._slots) // self._shape.num_gpus

    def launch(self, place: int, rank: int) -> SpawnedEngine:
        """Starts an engine actor beside the engine's first GPU on each node, which launches its server."""
        first, per_node = place * self._shape.num_gpus, self._config.cluster.num_gpus_per_node
        parts = max(1, self._shape.num_gpus // per_node)
        actors: list[Any] = []
        for part in range(parts):
            # Ray starts the others once the first has answered.
            options = {"meeting_point": actors[0].meeting_point.remote()} if part else {}
            actors.append(self._keep(rank, first + part * per_node, first, part, parts, **options))
        return SpawnedEngine(rank, actors)

    def _keep(self, rank: int, slot: int, first: int, part: int, parts: int, **options: Any) -> Any:
        offset = self._first_slot + first
        return (
            ray.remote(EngineActor)
            .options(
                num_gpus=0.2,
                num_cpus=0.2,
                max_concurrency=CALLS_AT_ONCE,
                scheduling_strategy=self._slots.strategy(slot),
                runtime_env=runtime_env(process_env()),
            )
            .remote(
                _plain(self._config.flat),
                rank,
                self._shape,
                gpu_offset=offset if self._config.cluster.colocate and offset < self._trainer_gpus else None,
                base_gpu_id=self._slots.gpu_ids[slot],
                part=part,
                parts=parts,
                engine=self._config.engines.rollout_engine,
                **options,
            )
        )

    def wait_ready(self, handles: Sequence[SpawnedEngine], timeout: float) -> list[EngineEndpoint]:
        """Waits until the engines serve with all their parts, and returns where."""
        parts = [[actor.wait_ready.remote(timeout) for actor in handle.actors] for handle in handles]
        refs = [ref for own in parts for ref in own]
        answers = wait_all(refs, "start of the rollout engines", timeout + ANSWER_TIMEOUT)
        return [answers[refs.index(own[0])] for own in parts]


def _plain(args: Namespace) -> Namespace:
    """Returns the arguments that can be unpickled without importing torch and our classes, a second's work.

    Options of the server are all kept: one that is left out would be at its default without a word.
    """
    given = vars(args).items()
    plain = {name: value for name, value in given if name.startswith("sglang_") or _is_plain(value)}
    return Namespace(**plain)


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, [*value.keys(), *value.values()]))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return type(value) in (bool, int, float, str, type(None))
