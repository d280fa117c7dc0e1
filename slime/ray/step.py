"""One training step: what both loops do with a rollout between two weight updates."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slime.utils.misc import should_run_periodic_action, trains_actor

if TYPE_CHECKING:  # bad flags are answered without waiting for these
    from argparse import Namespace

    from slime.ray.train_group import RayTrainGroup


class TrainingStep:
    """Trains the critic, then the actor, on a rollout, and saves both when a checkpoint is due.

    Args:
        num_rollout_per_epoch: a checkpoint is due at the end of an epoch too; None without epochs.
    """

    def __init__(
        self,
        args: "Namespace",
        actor: "RayTrainGroup",
        critic: "RayTrainGroup",
        num_rollout_per_epoch: int | None,
    ) -> None:
        self._args, self._actor, self._critic, self._epoch = args, actor, critic, num_rollout_per_epoch

    def run(self, rollout_id: int, batch: Sequence[Any]) -> None:
        """One rollout. The actor stays on its GPUs, for the weight update.

        Args:
            batch: references to the train shard of each data-parallel rank.
        """
        args, actor, critic = self._args, self._actor, self._critic
        saves = should_run_periodic_action(rollout_id, args.save_interval, self._epoch, args.num_rollout)
        last = rollout_id == args.num_rollout - 1

        critic.onload()
        values = critic.train(rollout_id, batch)
        if saves:
            critic.save_model(rollout_id, force_sync=last)
        critic.offload()

        actor.onload()
        if trains_actor(args, rollout_id):
            actor.train(rollout_id, batch, values)
        if saves:
            actor.save_model(rollout_id, force_sync=last)
