"""The asynchronous loop: while the trainer works on one rollout, the engines generate the next.

``train_async.py`` and ``slime train --async`` run it.

Training data is one rollout old. Trainer and engines need GPUs of their own (no ``--colocate``). After a
resume the first rollout is made with the checkpoint's weights, where the run that was stopped had used those
before them: unlike train.py, this loop does not repeat such a run bit for bit.
"""

from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING

from slime.arguments.groups.off_policy import staleness_notes
from slime.ray.synchronous import TrainingStep, evaluates_at_start
from slime.utils.misc import should_run_periodic_action as is_due

if TYPE_CHECKING:  # bad flags are answered without waiting for these
    from slime.config.run import RunConfig
    from slime.observability.run_log import RunLog
    from slime.ray.rollout_group import RolloutGroup
    from slime.ray.train_group import RayTrainGroup


def train(
    config: "RunConfig",
    actor: "RayTrainGroup",
    critic: "RayTrainGroup",
    rollout: "RolloutGroup",
    log: "RunLog",
) -> None:
    epoch = rollout.num_rollout_per_epoch
    start, end = actor.start_rollout_id, config.data.total_rollouts
    step = TrainingStep(config, actor, critic, rollout, epoch)

    if start >= end:
        return

    actor.update_weights()
    actor.offload()
    if start > 0 and evaluates_at_start(config.evaluation, config.data.total_rollouts, start, epoch):
        rollout.eval(start)
    upcoming = rollout.async_generate(start)

    for rollout_id in range(start, end):
        batch = upcoming.result()
        updates = (rollout_id + 1) % config.weight_sync.update_weights_interval == 0
        if rollout_id + 1 < end:
            upcoming = rollout.async_generate(rollout_id + 1, updates_ahead=int(updates))

        step.run(rollout_id, batch)

        if updates:
            # A rollout must not see two versions: let the one under way finish first.
            upcoming.result()
            actor.update_weights()
        actor.offload()

        if is_due(rollout_id, config.evaluation.eval_interval, epoch):
            upcoming.result()
            rollout.eval(rollout_id + 1)

        log.end_step(rollout_id)


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
