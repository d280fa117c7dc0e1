"""The processes of a trainer's ranks: fresh ones, and standbys that have imported everything already."""

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray

from slime.config.run import RunConfig
from slime.ray.actor_classes import StandbyRank, TrainRayActor
from slime.ray.node import process_env, runtime_env
from slime.ray.placement_group import Slots

logger = logging.getLogger(__name__)

# A colocated engine takes part of the same GPU: 0.4 + 0.2 leaves room for both and for probes.
GPU_PER_ACTOR = 0.4

_ANSWER_TIMEOUT = 5.0  # seconds that a standby has to take a place; it does nothing else


@dataclass
class _Standby:
    """A process that waits. It is asked again and again, so that its end is known.

    Attributes:
        answer: to the last question, which it can answer once everything is imported.
        ready: it has answered before.
        node: where it is, by Ray's id.
    """

    rank: int
    actor: Any
    answer: ray.ObjectRef
    ready: bool = False
    node: str = ""


class RankProcesses:
    """Starts an actor in each slot, out of a standby of that rank where one is ready.

    A standby holds host memory alone: no share of a GPU, no CUDA context, no process group.
    """

    def __init__(self, config: RunConfig, role: str, slots: Slots) -> None:
        self._config, self._role, self._slots = config, role, slots
        self._name = f"{config.policies.policy_name or ''} {role}".strip()
        self._wanted = dict.fromkeys(range(len(slots)), config.fault_tolerance.trainer_standbys)
        self._waiting: list[_Standby] = []

    def start(self, config: RunConfig) -> list[Any]:
        """Returns the actors of all ranks, in order; they answer when they have started."""
        found = self._standbys_for(config)
        if found:
            logger.warning("%s: %d of %d ranks were standbys", self._name, len(found), len(self._slots))
        return [found.get(rank) or self._fresh(rank, config) for rank in range(len(self._slots))]

    def nodes(self) -> list[str]:
        """Ray's id of the node of each rank, as `Slots.nodes_now` finds it."""
        return self._slots.nodes_now()

    def keep_standbys(self) -> None:
        """Starts those that are missing, and does not wait for them."""
        self._look()
        for rank, wanted in self._wanted.items():
            here = sum(standby.rank == rank for standby in self._waiting)
            self._waiting += [self._standby(rank) for _ in range(wanted - here)]

    def end_standbys(self) -> None:
        for standby in self._waiting:
            ray.kill(standby.actor)
        self._waiting = []

    def _fresh(self, rank: int, config: RunConfig) -> Any:
        actor = self._actor_class(TrainRayActor, rank, GPU_PER_ACTOR)
        return actor.remote(config.flat, self._role, rank, len(self._slots))

    def _standby(self, rank: int) -> _Standby:
        actor = self._actor_class(StandbyRank, rank, 0).remote(self._config.flat)
        return _Standby(rank, actor, actor.process_location.remote())

    def _actor_class(self, kind: type, rank: int, share: float) -> Any:
        env = process_env(self._config.trainer.train_env_vars, trainer=True)
        place = self._slots.strategy(rank)
        return ray.remote(kind).options(
            num_gpus=share, num_cpus=share, scheduling_strategy=place, runtime_env=runtime_env(env)
        )

    def _look(self) -> None:
        """Forgets those that have ended, and asks the others again."""
        for standby in list(self._waiting):
            if not ray.wait([standby.answer], timeout=0)[0]:
                continue
            try:
                standby.node, _ = ray.get(standby.answer, timeout=0)
            except ray.exceptions.RayError as error:
                self._waiting.remove(standby)
                self._tell_end(standby, str(error))
            else:
                standby.ready, standby.answer = True, standby.actor.process_location.remote()

    def _tell_end(self, standby: _Standby, why: str) -> None:
        """One that cannot even start would end for ever."""
        then = "another one is started"
        if not standby.ready:
            self._wanted[standby.rank] -= 1
            then = "none is started in its place"
        told = "%s: a standby of rank %d has ended, %s: %s"
        logger.warning(told, self._name, standby.rank, then, why.strip().partition("\n")[0])

    def _standbys_for(self, config: RunConfig) -> dict[int, Any]:
        """The standbys that have taken their places, by rank."""
        self._look()
        chosen = {standby.rank: standby for standby in self._waiting if self._may_take_place(standby)}
        asked = {}
        for rank, standby in chosen.items():
            self._waiting.remove(standby)
            gpu = str(self._slots.gpu_ids[rank])
            place = config.flat, self._role, rank, len(self._slots), gpu
            asked[rank] = standby.actor.take_place.remote(*place)
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=_ANSWER_TIMEOUT)
        return {rank: chosen[rank].actor for rank, ref in asked.items() if self._has_taken(chosen[rank], ref)}

    def _may_take_place(self, standby: _Standby) -> bool:
        """Whether it is ready, and knows the GPU of its rank: not where that is on another node by now."""
        return standby.ready and standby.node == self._slots.nodes[standby.rank]

    def _has_taken(self, standby: _Standby, ref: ray.ObjectRef) -> bool:
        """Whether it has; one that has ended or is stopped is no loss, the rank starts afresh."""
        with suppress(ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            ray.get(ref, timeout=0)
            return True
        logger.warning("%s: the standby of rank %d does not answer", self._name, standby.rank)
        ray.kill(standby.actor)
        return False
