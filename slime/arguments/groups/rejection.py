"""Rejection sampling: data made by the engines, kept by its reward, and trained on by nobody yet."""

import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from slime.arguments.core.group import ConfigGroup
from slime.arguments.groups.rollout import REJECTION_SAMPLING, REJECTION_SAMPLING_FUNCTION
from slime.arguments.validate.outputs import bad_output
from slime.config.rejection import RejectionConfig

_STATE = re.compile(r"global_dataset_state_dict_(\d+)\.pt")


def samples_by_rejection(args: Namespace) -> bool:
    return args.rollout_function_path == REJECTION_SAMPLING_FUNCTION


def notes(args: Namespace) -> Iterator[str]:
    """A place that nobody writes to."""
    if args.rejection_output is not None and not samples_by_rejection(args):
        yield f"--rejection-output: no effect without --rollout-function-path {REJECTION_SAMPLING_FUNCTION}"


def derive(args: Namespace) -> None:
    """The books are saved beside the samples after each rollout, and found there again."""
    if not samples_by_rejection(args) or args.rejection_output is None:
        return
    args.save = args.load = args.rejection_output
    args.save_interval = 1
    if args.start_rollout_id is None:
        args.start_rollout_id = _next_rollout(Path(args.rejection_output) / "rollout")


def _next_rollout(directory: Path) -> int:
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    done = [int(match[1]) for name in names if (match := _STATE.fullmatch(name))]
    return max(done, default=-1) + 1


def contradictions(args: Namespace) -> Iterator[str]:
    """Samples that go nowhere, and a trainer that would get none."""
    if not samples_by_rejection(args):
        return
    if args.rejection_output is None:
        yield f"--rejection-output: missing (wanted: a directory; {REJECTION_SAMPLING} writes samples)"
    if not args.debug_rollout_only:
        yield f"{REJECTION_SAMPLING}: trains nothing (wanted: --debug-rollout-only)"


def missing(args: Namespace) -> Iterator[str]:
    """A directory for the samples."""
    return bad_output(args, "rejection_output", is_directory=True)


CONFIG_GROUP = ConfigGroup(
    {"rejection sampling": RejectionConfig},
    notes=notes,
    derive=derive,
    contradictions=contradictions,
    missing=missing,
)
