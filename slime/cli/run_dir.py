"""What a run has left in its directory, as ``report``, ``resume`` and ``diff`` read it."""

import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.arguments.core.config_entries import RECORD, Tree, read_tree
from slime.arguments.core.errors import UsageError

_STARTED_IN = re.compile(r"^# slime .*, in (/.*)$", re.MULTILINE)
_LEFT_OUT = re.compile(r"^  # (\w+): not written", re.MULTILINE)


@dataclass(frozen=True)
class Record:
    """A run's record.

    Attributes:
        flags: those that are not their default, by name.
        headings: where each of them stands.
        left_out: names of flags whose values may be secrets.
        started_in: working directory of the run, against which its relative paths are meant.
    """

    path: Path
    flags: dict[str, Any] = field(default_factory=dict)
    headings: dict[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    started_in: Path | None = None


def read_record(place: str) -> Record:
    """The record in a run's directory, or any file of flags.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    path = _in_run(place, RECORD, "a file of flags")
    tree = read_tree(str(path), place)
    text = path.read_text(encoding="utf-8")
    started = _STARTED_IN.search(text)
    record = Record(path, {}, {}, tuple(_LEFT_OUT.findall(text)), Path(started[1]) if started else None)
    for entry in tree.entries:
        inner = entry.value.entries if isinstance(entry.value, Tree) else [entry]
        heading = entry.key if isinstance(entry.value, Tree) else ""
        for flag in inner:
            name = flag.key.replace("-", "_")
            record.flags[name] = flag.value.plain() if isinstance(flag.value, Tree) else flag.value
            record.headings[name] = heading
    return record


def metrics_file(place: str, record: Record | None = None) -> Path:
    """Where a run's metrics are: the file that its record names, else that in its directory.

    Raises:
        UsageError: nothing is there.
    """
    named = record.flags.get("metrics_file") if record else None
    if not named:
        return _in_run(place, "metrics.jsonl", "its file of metrics")
    return ((record.started_in if record else None) or Path()) / str(named)


def control_places(place: str, record: Record | None = None) -> tuple[Path, ...]:
    """Where a run that goes on says how it is asked: its directory, and that of the checkpoints.

    Args:
        record: of the run, if it has been read already.
    """
    if record is None:
        with suppress(UsageError):
            record = read_record(place)
    save = record.flags.get("save") if record else None
    return (Path(place), *([((record and record.started_in) or Path()) / str(save)] if save else ()))


def max_staleness(record: Record | None) -> int | None:
    """The bound of the run on the age of a group; None without one, or without a record."""
    bound = record.flags.get("max_staleness") if record else None
    return bound if isinstance(bound, int) else None


def _in_run(place: str, name: str, other: str) -> Path:
    """The file of this name in a run's directory, or the place itself, which is ``other``.

    Raises:
        UsageError: it is not there.
    """
    path = Path(place) / name if Path(place).is_dir() else Path(place)
    if not path.exists():
        found = f"has no {name}" if path != Path(place) else "is not there"
        raise UsageError(f"{place}: {found} (wanted: a run's directory, or {other})")
    return path
