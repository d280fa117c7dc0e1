"""``--check``: whether a run would start and what it would need, without starting it."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from slime.arguments.core.flag import flag
from slime.arguments.core.group import ConfigGroup


@dataclass(frozen=True)
class CheckArgs:
    """Look at a command line without running it."""

    check: bool = flag(
        False,
        help="print parameters, layout, batches and the memory of each GPU, and exit; starts nothing and "
        "needs no weights, of --hf-checkpoint no more than its config.json",
    )
    check_gpu_memory_gb: float | None = flag(
        above=0, help="memory of a GPU for --check, in GiB; default that of the GPU here, else 80"
    )


def notes(args: Namespace) -> Iterator[str]:
    """A size of which nothing is asked."""
    if args.check_gpu_memory_gb is not None and not args.check:
        yield f"--check-gpu-memory-gb {args.check_gpu_memory_gb}: has no effect without --check"


CONFIG_GROUP = ConfigGroup({"check": CheckArgs}, notes=notes)
