"""A file of metrics that grows, by column."""

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from math import isfinite
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, TypeVar

import orjson

from slime.observability.alerts import Alert, AlertWatch
from slime.observability.jsonl import RESERVED_KEYS

MAX_POINTS = 1500
"""More than these of a curve no screen shows."""
READING_SECONDS = 0.5
"""A look at long files ends after these, and the next one goes on: the page is not to wait for all of it."""
_RECENT = 20
_HEAD = 256
"""Bytes by which a file is known again: the first row has the time at which it was written."""
T = TypeVar("T")
Point = tuple[int, float | None]
"""Step and value; None is one that is not finite."""


class MetricsFile:
    """The curves of a run; each look reads what was written since the last one.

    Where a resumed run repeats a step, its values win. A file that has become shorter or begins otherwise is
    another run's, and is read anew.
    """

    def __init__(self, path: Path, max_staleness: int | None = None) -> None:
        self.path, self._max_staleness = path, max_staleness
        self._lock = Lock()
        self._forget()

    def _forget(self) -> None:
        self._offset = 0
        self._size = 0
        self._head = b""
        self._axes: dict[str, str] = {}
        self._columns: dict[str, dict[int, float | None]] = {}
        self._ends: dict[str, int] = {}
        self._times: tuple[float, float] | None = None
        self._watch = AlertWatch(self._max_staleness)

    def refresh(self, seconds: float = READING_SECONDS) -> None:
        """Reads the lines that are new and complete, for these seconds at most.

        Raises:
            OSError: the file cannot be read.
            ValueError: a line is no row of metrics.
        """
        until = time.monotonic() + seconds
        with self._lock, self.path.open("rb") as file:
            self._find_place(file)
            for line in file:
                if not line.endswith(b"\n"):  # still being written
                    self._size = self._offset
                    break
                self._take(line)
                self._offset += len(line)
                if time.monotonic() > until:
                    break

    def _find_place(self, file: BinaryIO) -> None:
        head = file.read(_HEAD)
        size = file.seek(0, 2)
        if size < self._offset or not head.startswith(self._head[: self._offset]):
            self._forget()
        self._size, self._head = size, head
        file.seek(self._offset)

    def _take(self, line: bytes) -> None:
        try:
            row = orjson.loads(line)
            axis, step, wrote = str(row["axis"]), int(row["step"]), float(row["time"])
            if not isfinite(wrote):
                raise ValueError(f"time {wrote}")
        except (orjson.JSONDecodeError, TypeError, KeyError, ValueError) as error:
            raise ValueError(f"{self.path}, byte {self._offset}: not a row of metrics ({error!r})") from error
        self._ends[axis] = max(step, self._ends.get(axis, 0))
        self._times = (self._times[0] if self._times else wrote, wrote)
        for name, value in row.items():
            # JSON's floats are finite, and most values are such; millions are read at once.
            if name in RESERVED_KEYS or not (type(value) is float or _is_number(value)):
                continue
            if (column := self._columns.get(name)) is None:
                self._axes[name], column = axis, self._columns.setdefault(name, {})
            column[step] = value if type(value) is float else _finite(value)
        self._watch.write(axis, step, row)

    def alerts(self) -> list[Alert]:
        """Returns what has gone wrong as far as the file is read."""
        with self._lock:
            return self._watch.alerts()

    def summary(self) -> dict[str, Any]:
        """Returns the last step of each axis, when the run began and last wrote, and its metrics.

        ``read`` is the part of the file that they are from.
        """
        with self._lock:
            began, wrote = self._times or (None, None)
            metrics = {
                name: {"axis": self._axes[name], "last": latest(column)[-1][1]}
                for name, column in sorted(self._columns.items())
            }
            read = self._offset / self._size if self._size else 1.0
            return {"ends": {**self._ends}, "began": began, "wrote": wrote, "read": read, "metrics": metrics}

    def curve(self, name: str) -> list[Point]:
        """Returns steps and values in order, `MAX_POINTS` at most; none for an unknown name."""
        with self._lock:
            points = sorted(self._columns.get(name, {}).items())
        return list(thinned(points, MAX_POINTS))

    def columns(self, names: Sequence[str]) -> list[dict[int, float | None]]:
        """Returns the whole curve of each name, by steps; empty for one that is not known."""
        with self._lock:
            return [dict(self._columns.get(name, {})) for name in names]

    def table(self, names: Sequence[re.Pattern[str]], rows: int) -> dict[str, Any]:
        """Returns the last rows of the metrics that match one of ``names``, in their order.

        ``totals`` are the sums of whole curves; a value of a row is None where its step has none.
        """
        with self._lock:
            found = {
                name: self._columns[name]
                for pattern in names
                for name in sorted(self._columns)
                if pattern.fullmatch(name)
            }
            ends = [{step for step, _ in latest(column)} for column in found.values()]
            steps = sorted(set().union(*ends))[-rows:]
            return {
                "names": list(found),
                "totals": [_sum(column.values()) for column in found.values()],
                "rows": [[step, *(column.get(step) for column in found.values())] for step in steps],
            }

    def seconds(self) -> dict[str, float]:
        """Returns the mean seconds of each part of the last steps, by its name."""
        with self._lock:
            spent = {name: latest(column) for name, column in self._columns.items()}
        return dict(_means(spent))


def _means(spent: Mapping[str, list[Point]]) -> Iterator[tuple[str, float]]:
    for name, points in spent.items():
        if name.startswith("perf/") and name.endswith("_time") and (mean := _mean(points)[1]) is not None:
            yield name.removeprefix("perf/").removesuffix("_time"), mean


def _sum(values: Iterable[float | None]) -> float | None:
    """The sum of the values that are there; None where it is beyond what a float holds."""
    found = sum(filter(None, values))
    return found if isfinite(found) else None


def thinned(points: list[Point], most: int) -> Iterable[tuple[int, float | None]]:
    """Yields ``most`` points at most, each the mean of those in its place; the last stays as it is."""
    return points if len(points) <= most else map(_mean, parts(points, most))


def parts(rows: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    """Yields the rows in ``most`` parts at most, of about the same length; the last row is one of its own."""
    count = min(most, len(rows))
    edges = [index * (len(rows) - 1) // max(1, count - 1) for index in range(count)]
    yield from (rows[start:end] for start, end in pairwise([*edges, len(rows)]))


def _mean(points: Sequence[Point]) -> Point:
    found = [value for _, value in points if value is not None]
    total = _sum(found) if found else None
    return points[0][0], None if total is None else total / len(found)


def latest(column: dict[int, float | None]) -> list[Point]:
    """The last steps in order. They are written about in order, so that no more is looked at than these."""
    return sorted(islice(reversed(column.items()), _RECENT))


def _is_number(value: Any) -> bool:
    return (isinstance(value, int | float) and not isinstance(value, bool)) or value in ("nan", "inf", "-inf")


def _finite(value: Any) -> float | None:
    return None if isinstance(value, str) else float(value)
