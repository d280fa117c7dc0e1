"""The metrics file: one JSON object per line, complete after every line."""

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from slime.utils.misc import naming

RESERVED_KEYS = frozenset({"axis", "step", "time"})


class JsonlWriter:
    """Appends ``{"axis", "step", "time", <metrics>}`` rows to a file.

    A resumed run continues the file of the run before it; `read_metrics` sorts that out. NaN and
    infinities, which JSON lacks, are written as the strings "nan" and "inf".
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self.path = path
        self._file = path.open("ab")

    def write(self, axis: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one row and hand it to the operating system.

        Raises:
            ValueError: a metric uses a name that the row needs for itself.
            OSError: with the name of the file, as where the disk is full.
        """
        if clash := RESERVED_KEYS & metrics.keys():
            raise ValueError(f"metric names {sorted(clash)} are reserved for the row itself")
        row = {"axis": axis, "step": step, "time": time.time()}
        row |= {name: _plain(value) for name, value in metrics.items()}
        with naming(self.path):
            self._file.write(orjson.dumps(row) + b"\n")
            self._file.flush()

    def close(self) -> None:
        with naming(self.path):  # what could not be written is tried again
            self._file.close()


def _cut_torn_line(path: Path) -> None:
    """A killed process may have left half a row, which the next row would make a broken line of."""
    if path.is_file() and not (content := path.read_bytes()).endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)


def read_metrics(path: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """The metrics of each step of each axis, merged over the step's rows; steps ascend.

    Where a resumed run repeats a step, its values win.

    Raises:
        ValueError: see `read_rows`.
    """
    merged: dict[str, dict[int, dict[str, Any]]] = {"train": {}, "rollout": {}, "eval": {}}
    for axis, step, row in read_rows(path):
        merged[axis].setdefault(step, {}).update(row)
    return {axis: dict(sorted(steps.items())) for axis, steps in merged.items()}


def read_rows(path: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yields axis, step and metrics of each row, as they were written.

    A last line without its newline is what a killed process left behind; it is skipped.

    Raises:
        ValueError: a complete line is not a JSON object, named by file and line number.
    """
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not a JSON object ({error})") from error
        yield row.pop("axis"), row.pop("step"), row


def _plain(value: Any) -> Any:
    """``value`` as something JSON can hold; numpy and torch scalars become Python numbers."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
