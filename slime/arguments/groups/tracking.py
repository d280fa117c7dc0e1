"""The destinations of metrics."""

from argparse import Namespace
from collections.abc import Iterator

from slime.arguments.core.group import ConfigGroup
from slime.arguments.validate.outputs import bad_output
from slime.config.tracking import TrackingConfig


def derive(args: Namespace) -> None:
    """Whether groups of runs get a suffix."""
    args.wandb_random_suffix = not args.disable_wandb_random_suffix


def missing(args: Namespace) -> Iterator[str]:
    """A place for the metrics file."""
    return bad_output(args, "metrics_file", is_directory=False)


CONFIG_GROUP = ConfigGroup({"tracking": TrackingConfig}, derive=derive, missing=missing)
