"""Files of flags, and the directory of a run."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from slime.arguments.core.flag import flag, place_flag
from slime.arguments.core.group import ConfigGroup
from slime.arguments.validate.outputs import bad_output


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


def missing(args: Namespace) -> Iterator[str]:
    """What cannot be written to."""
    yield from bad_output(args, "run_dir", is_directory=True)


CONFIG_GROUP = ConfigGroup({"run": RunFilesArgs}, missing=missing)
