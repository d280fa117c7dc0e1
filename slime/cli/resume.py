"""``slime resume``: goes on with a run from the latest checkpoint in its directory."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from slime.arguments.core.errors import UsageError
from slime.cli import train
from slime.cli.run_dir import Record, read_record

_USAGE = """usage: slime resume RUN_DIR [FLAG ...]

Goes on with a run from the latest checkpoint in its directory, with the flags that it was started with
and those that are given here: slime resume outputs/run --num-rollout 400"""


def run(words: Sequence[str]) -> int:
    """Starts the run again; the process ends with it."""
    if not words or words[0] in ("-h", "--help") or words[0].startswith("-"):
        print(_USAGE, file=sys.stdout if words[:1] in (["-h"], ["--help"]) else sys.stderr)
        return 0 if words[:1] in (["-h"], ["--help"]) else 2
    place, *flags = words
    try:
        record = read_record(place)
        path, checkpoints = record.path.resolve(), _checkpoints(record, place)
    except UsageError as error:
        for message in error.messages:
            print(f"error: {message}", file=sys.stderr)
        return 2
    for name in record.left_out:
        print(
            f"note: --{name.replace('_', '-')}: is not in {path} (wanted: give it again, if needed)",
            file=sys.stderr,
        )
    if record.started_in is not None:
        os.chdir(record.started_in)
    return train.run(["--config", str(path), "--load", checkpoints, *flags])


def _checkpoints(record: Record, place: str) -> str:
    """The directory of the run's checkpoints, as its flags name it.

    Raises:
        UsageError: there are none, or the directory in which the run was started is gone.
    """
    save = record.flags.get("save")
    if save is None:
        raise UsageError(f"{place}: the run had no --save (wanted: one with checkpoints)")
    here = record.started_in or Path()
    if not here.is_dir():
        raise UsageError(f"{place}: the run was started in {here}, which is gone (wanted: that directory)")
    if not any((here / str(save)).glob("iter_*")):
        raise UsageError(
            f"{place}: no checkpoint in {here / str(save)} (wanted: slime train, from the start)"
        )
    return str(save)
