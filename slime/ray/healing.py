"""What a loop does again when it has lost processes."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from slime.arguments.validate.checkpoint_files import newest_of_all

if TYPE_CHECKING:  # bad flags are answered without waiting for these
    from slime.config.run import RunConfig
    from slime.ray.losses import RanksLost, RolloutSideLost
    from slime.ray.policy_groups import PolicyGroups
    from slime.ray.rollout_group import RolloutGroup
    from slime.ray.train_group import RayTrainGroup

logger = logging.getLogger(__name__)


def node_is_alive() -> bool:
    """Whether processes can still be started from here; see `slime.ray.node.node_is_alive`."""
    from slime.ray import node

    return node.node_is_alive()


class Healing:
    """Takes steps, and takes those again in which processes were lost.

    Where the rollout side is lost it is a part of a step. Training loses nothing: it has its batch, and what
    is lost meanwhile is found by who needs it next. Where ranks of the trainer are lost all steps since the
    latest checkpoint are taken again.

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
        sync_weights: Callable[[], None],
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        self._config, self._actor, self._critic = config, actor, critic
        self._rollout, self._sync_weights, self._forget = rollout, sync_weights, forget

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
        lost: tuple[RanksLost, int] | None = None
        before(rollout_id)
        while rollout_id < steps.stop:
            try:
                if lost is not None:
                    rollout_id, lost = self._go_back(*lost), None
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

    def _newest(self) -> int | None:
        """The iteration of the latest checkpoint that is whole for all roles, if there is one."""
        saved = [role.checkpoints for role in self._roles]
        return newest_of_all(saved, self._config.checkpoints.verify_checkpoint) if saved else None

    def _go_back(self, lost: "RanksLost", newest: int) -> int:
        """Goes back to the latest checkpoint, and returns the rollout to go on with."""
        roles = self._roles
        told = "the trainer is started again from iteration %d of %s: %s"
        logger.warning(told, newest, roles[-1].checkpoints, lost)
        self._forget()
        self._rollout.end()  # engines may hold the GPUs on which the ranks build their models
        starts = {role.rebuild(role.checkpoints or "", up_to=newest) for role in roles}
        if len(starts) != 1:
            raise RuntimeError(f"roles go on with different rollouts: {sorted(starts)}") from lost
        (start,) = starts
        self._critic.offload()
        self.run(self._go_back_to, start)
        return start

    def _go_back_to(self, start: int) -> None:
        self._actor.offload()
        self._rollout.end()
        self._rollout.go_back(self._config.checkpoints.save or "", start - 1)
        self._actor.onload()
        self._sync_weights()

    def _may_go_back(self, losses: int) -> bool:
        """Whether ranks may be lost so often without a step that was not taken before."""
        faults = self._config.fault_tolerance
        return faults.use_fault_tolerance and losses <= faults.max_trainer_restarts
