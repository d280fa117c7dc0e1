"""The asynchronous loop: while the trainer works on one rollout, the engines generate the next.

``train_async.py`` and ``slime train --async`` run it.

Training data is one rollout old. Trainer and engines need GPUs of their own (no ``--colocate``). After a
resume the first rollout is made with the checkpoint's weights, where the run that was stopped had used those
before them: unlike train.py, this loop does not repeat such a run bit for bit. Nor does it repeat a rollout
so whose manager was lost while the trainer worked on the one before.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from slime.arguments.groups.off_policy import staleness_notes
from slime.ray.healing import Healing
from slime.ray.synchronous import Evaluations, TrainingStep
from slime.ray.trainer_snapshots import TrainerSnapshots
from slime.utils.misc import should_run_periodic_action as is_due

if TYPE_CHECKING:  # bad flags are answered without waiting for these
    from slime.config.run import RunConfig
    from slime.observability.run_log import RunLog
    from slime.ray.pending_rollout import PendingRollout
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
    start, end = actor.start_rollout_id, config.data.total_rollouts
    snapshots = TrainerSnapshots(config, actor, critic, rollout)
    step = TrainingStep(config, actor, critic, rollout, snapshots, epoch)
    side = EvaluationSide(config, rollout, log)
    ahead, sync_weights = _RolloutAhead(config, actor, rollout), actor.update_weights

    def take(rollout_id: int) -> None:
        ahead.begin(rollout_id)  # the first one, and the first one after ranks were lost
        healing.run(ahead.finish)
        batch, updates = ahead.batch(), _updates_after(rollout_id, config)
        if rollout_id + 1 < end:
            ahead.begin(rollout_id + 1, updates_ahead=int(updates))

        step.run(rollout_id, batch)

        if updates:
            # A rollout must not see two versions: let the one under way finish first.
            healing.run(ahead.finish)
            evaluations.prepare(rollout_id)
            healing.run(sync_weights)
        actor.offload()

        if is_due(rollout_id, config.evaluation.eval_interval, epoch):
            healing.run(ahead.finish)
        evaluations.after(rollout_id)

        log.end_step(rollout_id)

    if start >= end:
        return

    def before(rollout_id: int) -> None:
        actor.offload()
        if rollout_id > 0:
            evaluations.before(rollout_id)

    def forget() -> None:
        side.settle()
        ahead.forget()

    healing = Healing(config, actor, critic, rollout, snapshots, sync_weights, forget)
    evaluations = Evaluations(config, rollout, healing, side)
    rollout.keep_state()
    healing.run(sync_weights)
    side.tell_unfinished(start)
    healing.take_all(take, range(start, end), before)
    evaluations.end()


def _updates_after(rollout_id: int, config: "RunConfig") -> bool:
    return (rollout_id + 1) % config.weight_sync.update_weights_interval == 0


class _RolloutAhead:
    """The rollout that the engines make while the trainer works on the one before it.

    Its batch is held here until it is trained on: a rollout manager that is lost costs only what it has not
    finished, which is made again from the same prompts, with the weights that the trainer has then.
    """

    def __init__(self, config: "RunConfig", actor: "RayTrainGroup", rollout: "RolloutGroup") -> None:
        self._config, self._actor, self._rollout = config, actor, rollout
        self._pending: PendingRollout | None = None
        self._id = -1

    def begin(self, rollout_id: int, updates_ahead: int = 0) -> None:
        """Starts it, unless it has been."""
        if self._pending is None or self._id != rollout_id:
            self._id, self._pending = rollout_id, self._rollout.async_generate(rollout_id, updates_ahead)

    def finish(self) -> None:
        """Waits for it; another manager would go on after it then."""
        assert self._pending is not None
        self._pending.result()
        self._rollout.end_step()
        if self._pending.repeated:
            self._actor.follow_engines()

    def batch(self) -> Sequence[Any]:
        """References to its shards; it has finished."""
        assert self._pending is not None
        return self._pending.result()

    def forget(self) -> None:
        """All rollouts since a checkpoint are made again."""
        self._pending = None


def refusal(args: Namespace) -> Iterator[str]:
    if args.colocate:
        yield "--colocate: train_async.py needs GPUs for the engines alone (wanted: without --colocate)"
    if args.max_staleness == 0:
        yield (
            "--max-staleness 0: train_async.py updates the weights between a rollout and its training "
            "(wanted: 1 or more, or train.py)"
        )
    if args.num_rollout == 0:
        yield "--num-rollout 0: train_async.py has nothing to do (wanted: train.py, which evaluates)"


def notes(args: Namespace) -> Iterator[str]:
    return staleness_notes(args, "train_async.py")
