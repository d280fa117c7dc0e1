"""Versions of weights for engines that others bring them to."""

from argparse import Namespace
from collections.abc import Iterator

from slime.config.lora import LoraConfig
from slime.config.run import filled


def is_followed(args: Namespace) -> bool:
    """Whether a follower of each engine has a local directory, and the run none."""
    return bool(args.rollout_external or args.publish_weights)


def bad_following(args: Namespace) -> Iterator[str]:
    """What publishing cannot do without, and what only a trainer can do that speaks to its engines."""
    is_delta, is_disk = args.update_weight_mode == "delta", args.update_weight_transport == "disk"
    if args.publish_weights:
        if not args.debug_train_only:
            yield "--publish-weights: the run has engines, which get all weights (wanted: --debug-train-only)"
        if not (is_delta and is_disk):
            yield (
                f"--publish-weights: with --update-weight-transport {args.update_weight_transport} and "
                f"--update-weight-mode {args.update_weight_mode} (wanted: disk and delta)"
            )
    if not (args.rollout_external and is_delta and is_disk):
        return
    where = "--update-weight-mode delta: with --rollout-external-engine-addrs"
    if args.check_weight_update_equal:
        yield f"{where} and --check-weight-update-equal, for which this run would have to stop the engines"
    if filled(LoraConfig, args).serves_adapter:
        yield f"{where} and --no-lora-merge, whose adapters this run gives the engines itself (wanted: full)"
