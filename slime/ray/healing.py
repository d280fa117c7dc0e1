"""What a loop does again when it has lost processes."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime.arguments.validate.checkpoint_files import newest_of_all
from slime.ray.snapshot_place import is_on_hosts
from slime.ray.trainer_snapshots import TrainerSnapshots

if TYPE_CHECKING:  # bad flags are answered without waiting for these
    from slime.config.run import RunConfig
    from slime.ray.losses import RanksLost, RolloutSideLost
    from slime.ray.policy_groups import PolicyGroups
    from slime.ray.rollout_group import RolloutGroup
    from slime.ray.train_group import RayTrainGroup
    from slime.rollout.data_state import DataState

logger = logging.getLogger(__name__)


def node_is_alive() -> bool:
    """Whether processes can still be started from here; see `slime.ray.node.node_is_alive`."""
    from slime.ray import node

    return node.node_is_alive()


@dataclass(frozen=True)
class Point:
    """What a trainer goes on from.

    Attributes:
        places: the directory of each group of ranks, of checkpoints or of snapshots in memory.
    """

    iteration: int
    places: "Mapping[RayTrainGroup, str | Path]"
    in_memory: bool = False

    def __str__(self) -> str:
        *_, place = self.places.values()
        if is_on_hosts(place):
            return f"iteration {self.iteration}, a snapshot in the memory of its hosts"
        return f"iteration {self.iteration} of {place}{', a snapshot in memory' if self.in_memory else ''}"


class Healing:
    """Takes steps, and takes those again in which processes were lost.

    Where the rollout side is lost it is a part of a step. Training loses nothing: it has its batch, and what
    is lost meanwhile is found by who needs it next. Where ranks of the trainer are lost all steps since the
    latest checkpoint, or the latest snapshot in memory, are taken again.

    Args:
        sync_weights: gives engines the weights, which the trainer has on its GPUs.
        forget: drops what the loop holds of rollouts that are made again, when it goes back to a checkpoint.
    """

    def __init__(
        self,
        config: "RunConfig",
        actor: "RayTrainGroup | PolicyGroups",
        critic: "RayTrainGroup",
        rollout: "RolloutGroup",
        snapshots: TrainerSnapshots,
        sync_weights: Callable[[], None],
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        self._config, self._actor, self._critic = config, actor, critic
        self._rollout, self._sync_weights, self._forget = rollout, sync_weights, forget
        self._snapshots = snapshots

    def take_all(
        self, take: Callable[[int], None], steps: range, before: Callable[[int], None] = lambda start: None
    ) -> None:
        """Takes these steps, by ``take(rollout_id)``.

        Args:
            before: is called with the first step, and with the one that a checkpoint leads back to; that may
                be the end, where ranks are lost between the last checkpoint and the end of its step.

        Raises:
            RanksLost: too often, or there is no checkpoint of this run to go back to.
        """
        from slime.ray.losses import RanksLost

        rollout_id, furthest, losses = steps.start, steps.start, 0
        lost: tuple[RanksLost, Point] | None = None
        before(rollout_id)
        while rollout_id < steps.stop:
            try:
                if lost is not None:
                    rollout_id, lost = self._go_back(*lost, rollout_id), None
                    before(rollout_id)
                    continue
                take(rollout_id)
            except RanksLost as error:
                losses += 1
                newest = self._newest() if self._may_go_back(losses) and node_is_alive() else None
                if newest is None:
                    raise
                lost = error, newest
                continue
            rollout_id += 1
            if rollout_id > furthest:
                furthest, losses = rollout_id, 0

    def run(self, part: Callable[..., None], *arguments: int) -> None:
        """Takes a part of a step.

        Raises:
            RolloutSideLost: too often, or none may be started again.
        """
        from slime.ray.losses import RolloutSideLost

        lost: RolloutSideLost | None = None
        while True:
            try:
                if lost is not None:
                    self._start_again(lost)
                if lost is None or part is not self._sync_weights:
                    part(*arguments)
                return
            except RolloutSideLost as error:
                if not (self._rollout.may_restart() and node_is_alive()):
                    raise
                lost = error

    def _start_again(self, lost: "RolloutSideLost") -> None:
        """Starts the rollout side again; it has the weights then, and a trainer on its GPUs has left them."""
        self._actor.offload()
        self._rollout.restart(lost)
        self._actor.onload()
        self._sync_weights()

    @property
    def _roles(self) -> "list[RayTrainGroup]":
        from slime.ray.policy_groups import PolicyGroups

        actors = self._actor.groups if isinstance(self._actor, PolicyGroups) else [self._actor]
        return [role for role in (self._critic, *actors) if role.checkpoints]

    def _newest(self) -> Point | None:
        """The latest snapshot or checkpoint that is whole for all roles, if there is one.

        Of a checkpoint without the optimizer's state and a snapshot, which has it, the snapshot.
        """
        saved, kept = self._saved(), self._snapshots.newest()
        if kept is None or (saved and saved.iteration > kept and not self._config.checkpoints.no_save_optim):
            return saved
        return Point(kept, self._snapshots.places, in_memory=True)

    def _saved(self) -> Point | None:
        """The latest checkpoint that is whole for all roles."""
        places = {role: role.checkpoints or "" for role in self._roles}
        verify = self._config.checkpoints.verify_checkpoint
        iteration = newest_of_all([*places.values()], verify) if places else None
        return None if iteration is None else Point(iteration, places)

    def _go_back(self, lost: "RanksLost", newest: Point, rollout_id: int) -> int:
        """Goes back to the latest checkpoint or snapshot, and returns the rollout to go on with.

        Args:
            rollout_id: in whose step ranks were lost.
        """
        self._tell(lost, newest, rollout_id)
        self._forget()
        self._rollout.end()  # engines may hold the GPUs on which the ranks build their models
        newest, starts = self._rebuilt(newest, rollout_id)
        if len(starts) != 1:
            raise RuntimeError(f"roles go on with different rollouts: {sorted(starts)}") from lost
        (start,) = starts
        state = self._snapshots.position(newest.iteration) if newest.in_memory else None
        self._snapshots.go_back(newest.iteration)
        self._critic.offload()
        self.run(lambda: self._go_back_to(start, state))
        return start

    def _tell(self, why: Exception, newest: Point, rollout_id: int) -> None:
        finished = max(rollout_id - newest.iteration - 1, 0)
        costs = {0: "the step under way", 1: "a finished step and the one under way"}
        cost = costs.get(finished, f"{finished} finished steps and the one under way")
        cost = "no step" if rollout_id <= newest.iteration else cost
        logger.warning("the trainer is started again from %s, which costs %s: %s", newest, cost, why)

    def _rebuilt(self, newest: Point, rollout_id: int) -> tuple[Point, set[int]]:
        """Builds all roles; from a checkpoint, if a snapshot that looks whole cannot be loaded.

        Returns:
            What they were built from, and the rollouts with which they go on.
        """
        from ray.exceptions import RayTaskError

        try:
            return newest, self._build(newest)
        except (ValueError, RayTaskError) as error:
            saved = self._saved()
            if not newest.in_memory or saved is None:
                raise
            self._snapshots.discard()
            self._tell(error, saved, rollout_id)
            return saved, self._build(saved)

    def _build(self, newest: Point) -> set[int]:
        if newest.in_memory:
            self._snapshots.bring(newest.iteration)
        return {role.rebuild(place, up_to=newest.iteration) for role, place in newest.places.items()}

    def _go_back_to(self, start: int, state: "DataState | None") -> None:
        self._actor.offload()
        self._rollout.end()
        self._rollout.go_back(self._config.checkpoints.save or "", start - 1, state)
        self._actor.onload()
        self._sync_weights()

    def _may_go_back(self, losses: int) -> bool:
        """Whether ranks may be lost so often without a step that was not taken before."""
        faults = self._config.fault_tolerance
        return faults.use_fault_tolerance and losses <= faults.max_trainer_restarts
