"""The synchronous loop: generate, train, sync the weights, again. ``train.py`` and ``slime train`` run it.

The same loop serves every layout: a side that shares no GPU ignores offload and onload, and a side
that a debug mode leaves out ignores everything, as does the critic where no estimator needs one.
"""

from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING

from slime.ray.step import TrainingStep
from slime.utils.misc import evaluates_at_start
from slime.utils.misc import should_run_periodic_action as is_due

if TYPE_CHECKING:  # bad flags are answered without waiting for these
    from slime.observability.run_log import RunLog
    from slime.ray.rollout_group import RolloutGroup
    from slime.ray.train_group import RayTrainGroup


def train(
    args: Namespace, actor: "RayTrainGroup", critic: "RayTrainGroup", rollout: "RolloutGroup", log: "RunLog"
) -> None:
    epoch = rollout.num_rollout_per_epoch
    step = TrainingStep(args, actor, critic, epoch)

    def sync_weights() -> None:
        actor.offload_training_state()
        rollout.onload_weights()
        actor.update_weights()
        actor.offload()
        rollout.onload_kv()

    sync_weights()

    start = actor.start_rollout_id
    if evaluates_at_start(args, start, epoch):
        rollout.eval(start)

    for rollout_id in range(start, args.num_rollout):
        batch = rollout.generate(rollout_id)
        rollout.offload()
        step.run(rollout_id, batch)
        sync_weights()

        if is_due(rollout_id, args.eval_interval, epoch):
            rollout.eval(rollout_id + 1)

        log.end_step(rollout_id)


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
