"""Files of flags, and the directory of a run."""

import os
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from slime.arguments.core.flag import flag, place_flag
from slime.arguments.core.group import ConfigGroup
from slime.arguments.validate.outputs import bad_output

SUPERVISED = "SLIME_SUPERVISED"
"""The environment of a run that is started again when it fails has this variable."""


@dataclass(frozen=True)
class RunFilesArgs:
    """Flags from files, and the directory of a run."""

    config: list[str] | None = flag(
        append=True,
        help="YAML or TOML file of flags; may be given several times, later ones win; "
        "the command line wins over all",
    )
    run_dir: str | None = place_flag(
        "directory of the run: --save and --load, unless they are given; resolved.yaml in it has all flags"
    )
    asynchronous: bool = flag(
        False, names=("--async",), help="generate the next rollout while this one is trained on"
    )
    supervise: bool = flag(
        False, help="slime train starts the run again when it fails, from its latest checkpoint"
    )
    max_restarts: int = flag(
        5,
        at_least=1,
        idle_without="--supervise",
        help="failures in a row without a new checkpoint after which --supervise gives up",
    )


def missing(args: Namespace) -> Iterator[str]:
    """What cannot be written to."""
    yield from bad_output(args, "run_dir", is_directory=True)


def contradictions(args: Namespace) -> Iterator[str]:
    """A run that cannot go on, or that nothing starts again."""
    if args.supervise and not args.check and SUPERVISED not in os.environ:
        yield "--supervise: this program starts nothing again (wanted: slime train --supervise)"
    if args.supervise and (args.save is None or args.load != args.save or args.save_interval is None):
        found = f"found --save {args.save}, --load {args.load}, --save-interval {args.save_interval}"
        yield f"--supervise: {found} (wanted: all three, one directory in the first two, as --run-dir has it)"


CONFIG_GROUP = ConfigGroup({"run": RunFilesArgs}, missing=missing, contradictions=contradictions)
