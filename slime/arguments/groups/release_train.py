"""``--release-train``: trainer processes that end while engines generate, and what it asks of other flags."""

from argparse import Namespace
from collections.abc import Iterator

_NAME = "--release-train"


def notes(args: Namespace) -> Iterator[str]:
    """What such a run decides by itself."""
    if not args.release_train:
        return
    if args.debug_rollout_only:
        yield f"{_NAME}: has no effect with --debug-rollout-only, there is no trainer"
        return
    each = f"has no effect with {_NAME}, which saves after each rollout"
    if args.save_interval not in (None, 1):
        yield f"--save-interval {args.save_interval}: {each}"
    if args.async_save:
        yield f"--async-save: {each} and waits for it"
    if args.max_failed_saves not in (0, 2):
        yield f"--max-failed-saves {args.max_failed_saves}: {each} and goes on from nothing else"
    if args.offload_train or args.offload:
        yield f"--offload-train: has no effect with {_NAME}, which ends the trainer instead"
    if args.asynchronous and args.update_weights_interval != 1:
        interval = args.update_weights_interval
        yield (
            f"--update-weights-interval {interval}: has no effect with {_NAME}, which sends them after each "
            "rollout"
        )
    if args.no_save_optim:
        yield f"--no-save-optim: with {_NAME} optimizer and learning rate begin anew with each rollout"


def derive(args: Namespace) -> None:
    """The trainer leaves the GPUs by its end, and goes on from a save that is whole."""
    if not args.release_train or args.debug_rollout_only:
        return
    args.offload_train = args.async_save = False
    args.offload_rollout = args.offload_rollout or args.colocate
    args.max_failed_saves, args.update_weights_interval = 0, 1
    if args.save is not None:
        args.save_interval = 1


def contradictions(args: Namespace) -> Iterator[str]:
    """What would end with the trainer, and what needs it while engines generate."""
    if not args.release_train or args.debug_rollout_only:
        return
    if args.save is None:
        yield f"{_NAME}: the trainer goes on from what it saved after each rollout (wanted: --save)"
    transport, mode = args.update_weight_transport, args.update_weight_mode
    if transport != "disk" or mode != "full":
        yield (
            f"{_NAME}: with --update-weight-transport {transport} and --update-weight-mode {mode}, which "
            "need what a trainer remembers of engines (wanted: disk and full)"
        )
    for what, why in _needing_it(args):
        yield f"{what}: with {_NAME}, {why} (leave one of them out)"


def _needing_it(args: Namespace) -> Iterator[tuple[str, str]]:
    if args.use_critic:
        yield "--use-critic or --advantage-estimator ppo", "which is for runs without a critic"
    if args.keep_old_actor:
        yield "--keep-old-actor", "with which the older weights would end"
    if args.policies is not None:
        yield "--policies", "which ends the trainer of one model"
    if args.lora_rank:
        yield f"--lora-rank {args.lora_rank}", "which starts again from whole weights alone"
    if args.trainer_standbys:
        yield f"--trainer-standbys {args.trainer_standbys}", "which leaves no trainer process waiting"
    if args.debug_train_only:
        yield "--debug-train-only", "which ends the trainer while engines generate, and there are none"
