"""``--check``: whether a run would start and what it would need, without starting it."""

from argparse import Namespace
from collections.abc import Iterator

from slime.arguments.core.group import ConfigGroup
from slime.config.check import CheckConfig


def notes(args: Namespace) -> Iterator[str]:
    """A size of which nothing is asked."""
    if args.check_gpu_memory_gb is not None and not args.check:
        yield f"--check-gpu-memory-gb {args.check_gpu_memory_gb}: has no effect without --check"


CONFIG_GROUP = ConfigGroup({"check": CheckConfig}, notes=notes)
