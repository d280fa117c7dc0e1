"""The synchronous loop: generate, train, sync the weights, again. ``train.py`` and ``slime train`` run it.

The same loop serves every layout: a side that shares no GPU ignores offload and onload, and a side
that a debug mode leaves out ignores everything, as does the critic where no estimator needs one.

`TrainingStep`, what is done with a rollout between two weight updates, is the asynchronous loop's too.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from slime.config.critic import trains_actor
from slime.ray.failed_saves import FailedSaves
from slime.ray.healing import Healing
from slime.ray.trainer_snapshots import TrainerSnapshots
from slime.utils.misc import should_run_periodic_action as is_due

if TYPE_CHECKING:  # bad flags are answered without waiting for these
    from slime.config.evaluation import EvalConfig
    from slime.config.run import RunConfig
    from slime.observability.run_log import RunLog
    from slime.ray.evaluation_side import EvaluationSide
    from slime.ray.rollout_group import RolloutGroup
    from slime.ray.train_group import RayTrainGroup


def train(
    config: "RunConfig",
    actor: "RayTrainGroup",
    critic: "RayTrainGroup",
    rollout: "RolloutGroup",
    log: "RunLog",
) -> None:
    from slime.ray.evaluation_side import EvaluationSide

    epoch = rollout.num_rollout_per_epoch
    snapshots = TrainerSnapshots(config, actor, critic, rollout)
    step = TrainingStep(config, actor, critic, rollout, snapshots, epoch)
    side = EvaluationSide(config, rollout, log)

    def sync_weights() -> None:
        actor.offload_training_state()
        rollout.onload_weights()
        actor.update_weights()
        actor.offload()
        rollout.onload_kv()

    def train_once(rollout_id: int) -> None:
        batch = rollout.generate(rollout_id)
        rollout.offload()
        step.run(rollout_id, batch)

    def take(rollout_id: int) -> None:
        healing.run(train_once, rollout_id)
        rollout.end_step()
        evaluations.prepare(rollout_id)
        healing.run(sync_weights)

        evaluations.after(rollout_id)
        log.end_step(rollout_id)

    healing = Healing(config, actor, critic, rollout, snapshots, sync_weights, side.settle)
    evaluations = Evaluations(config, rollout, healing, side)
    rollout.keep_state()
    healing.run(sync_weights)
    steps = range(actor.start_rollout_id, config.data.total_rollouts)
    side.tell_unfinished(steps.start)
    healing.take_all(take, steps, before=evaluations.before)
    evaluations.end()


class Evaluations:
    """The evaluations of a run. None is left out, and none is made twice, where ranks are lost around it."""

    def __init__(
        self, config: "RunConfig", rollout: "RolloutGroup", healing: Healing, side: "EvaluationSide"
    ) -> None:
        self._config, self._rollout, self._healing, self._side = config, rollout, healing, side
        self._made: int | None = None

    def before(self, rollout_id: int) -> None:
        """Makes the one that is due before a run's first rollout, or before the first after a checkpoint."""
        total, epoch = self._config.data.total_rollouts, self._rollout.num_rollout_per_epoch
        if evaluates_at_start(self._config.evaluation, total, rollout_id, epoch):
            self._make(rollout_id)

    def prepare(self, rollout_id: int) -> None:
        """Comes before the weight update after a rollout."""
        if self._is_due(rollout_id) and self._is_new(rollout_id + 1):
            self._healing.run(self._side.prepare)

    def after(self, rollout_id: int) -> None:
        """Makes, or begins, the one that is due after a rollout."""
        if self._is_due(rollout_id):
            self._make(rollout_id + 1)
        self._healing.run(self._side.look)

    def end(self) -> None:
        """Waits for the last one."""
        self._healing.run(self._side.finish)
        self._side.close()

    def _is_due(self, rollout_id: int) -> bool:
        interval, epoch = self._config.evaluation.eval_interval, self._rollout.num_rollout_per_epoch
        return is_due(rollout_id, interval, epoch)

    def _is_new(self, version: int) -> bool:
        return self._made is None or version > self._made

    def _make(self, version: int) -> None:
        if self._is_new(version):
            self._healing.run(self._side.evaluate, version)
            self._made = version


def evaluates_at_start(
    config: "EvalConfig", num_rollout: int, start: int, num_rollout_per_epoch: int | None
) -> bool:
    """Whether a run evaluates before rollout ``start``, its first one.

    A new run does unless told otherwise, and a run without rollouts does nothing else. A resumed run repeats
    an evaluation that was due at its checkpoint: its predecessor may have been stopped between the two.
    """
    if config.eval_interval is None:
        return False
    if num_rollout == 0:
        return True
    if start == 0:
        return not config.skip_eval_before_train
    return is_due(start - 1, config.eval_interval, num_rollout_per_epoch)


class TrainingStep:
    """Trains the critic, then the actor, on a rollout, and saves both when a checkpoint or a snapshot is due.

    Args:
        rollout: saves the position in the data by itself.
        num_rollout_per_epoch: a checkpoint is due at the end of an epoch too; None without epochs.
    """

    def __init__(
        self,
        config: "RunConfig",
        actor: "RayTrainGroup",
        critic: "RayTrainGroup",
        rollout: "RolloutGroup",
        snapshots: TrainerSnapshots,
        num_rollout_per_epoch: int | None,
    ) -> None:
        self._config, self._actor, self._critic, self._epoch = config, actor, critic, num_rollout_per_epoch
        self._snapshots = snapshots
        self._rollout, self._failed_saves = rollout, FailedSaves(config.checkpoints.max_failed_saves)

    def run(self, rollout_id: int, batch: Sequence[Any]) -> None:
        """One rollout. The actor stays on its GPUs, for the weight update.

        Args:
            batch: references to the train shard of each data-parallel rank.
        """
        config, actor, critic = self._config, self._actor, self._critic
        interval, end = config.checkpoints.save_interval, config.data.total_rollouts
        saves, last = is_due(rollout_id, interval, self._epoch, end), rollout_id == end - 1
        saved: list[list[str | None]] = []
        if saves and (reason := self._rollout.unsaved(rollout_id)) is not None:
            saves, saved = False, [[reason]]  # a run could not go on from weights alone

        self._snapshots.begin(rollout_id)
        critic.onload()
        values = critic.train(rollout_id, batch)
        if config.critic.use_critic:
            self._snapshots.take(rollout_id, critic)
        if saves:
            saved.append(critic.try_to_save(rollout_id, force_sync=last))
        critic.offload()

        actor.onload()
        if trains_actor(config.critic, rollout_id):
            actor.train(rollout_id, batch, values)
        self._snapshots.take(rollout_id, actor)
        if saves:
            saved.append(actor.try_to_save(rollout_id, force_sync=last))
        self._failed_saves.note(rollout_id, saved, last)


def refusal(args: Namespace) -> Iterator[str]:
    if args.asynchronous:
        yield "--async: train.py is the synchronous loop (wanted: slime train, or train_async.py)"
    if args.keep_old_actor:
        yield (
            "--keep-old-actor: train.py makes each rollout with the weights that it then trains "
            "(wanted: train_async.py, or without)"
        )


def notes(args: Namespace) -> Iterator[str]:
    if args.update_weights_interval != 1:
        interval = args.update_weights_interval
        yield f"--update-weights-interval {interval}: has no effect, train.py sends them after every rollout"
