"""How weights travel from the trainer to the engines."""

from argparse import Namespace
from collections.abc import Iterator

from slime.arguments.core.group import ConfigGroup
from slime.arguments.validate.outputs import bad_output
from slime.config.weight_sync import WeightSyncConfig


def notes(args: Namespace) -> Iterator[str]:
    """What is about a directory that nothing is written to."""
    if args.update_weight_transport == "disk":
        return
    unused = "has no effect without --update-weight-transport disk"
    if args.update_weight_disk_dir is not None:
        yield f"--update-weight-disk-dir {args.update_weight_disk_dir}: {unused}"
    if args.update_weight_disk_keep_files:
        yield f"--update-weight-disk-keep-files: {unused}"


def contradictions(args: Namespace) -> Iterator[str]:
    """A transport without its directory."""
    if args.update_weight_transport == "disk" and args.update_weight_disk_dir is None:
        yield (
            "--update-weight-disk-dir: missing (wanted: a directory that trainer and engines share, for "
            "--update-weight-transport disk)"
        )


def missing(args: Namespace) -> Iterator[str]:
    """The directory of versions, if it cannot be written."""
    yield from bad_output(args, "update_weight_disk_dir", is_directory=True)


CONFIG_GROUP = ConfigGroup(
    {"weight sync": WeightSyncConfig}, notes=notes, contradictions=contradictions, missing=missing
)
