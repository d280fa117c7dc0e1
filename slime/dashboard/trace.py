"""The file of ``--trace``, by steps: what each process did, and which rank is slower than the others."""

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

import orjson

from slime.observability.alert import Alert, RuleState
from slime.observability.alerts import SLOW_RANK
from slime.observability.slow_ranks import ALONE, of_slow

LISTED = 200
"""Steps that are listed."""
SHOWN_SPANS, LARGEST_STEP = 4000, 64 * 2**20
"""How much of one step is shown, and read."""
_RANK = re.compile(r"(.+) rank (\d+)")
_WHOLE_STEP = "step"  # of the driver
_SHOWN = ("group", "sample", "attempt", "turn", "rollout", "step", "version", "error")


@dataclass(frozen=True)
class _Step:
    """Where a step is: in seconds since the epoch, and in bytes of the file."""

    start: float
    end: float
    first_byte: int


class TraceFile:
    """A run's trace as it grows; a run without one has no steps."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._lock = Lock()
        self._forget()

    def _forget(self) -> None:
        self._offset, self._size = 0, 0
        self._names: dict[Any, str] = {}
        self._steps: dict[int, _Step] = {}
        self._ends = [0, 0]  # bytes at which the last steps ended
        self._alone: dict[tuple[str, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._ranks: dict[tuple[str, int], RuleState] = {}

    def refresh(self, seconds: float) -> None:
        """Reads the lines that are new and complete, for these seconds at most.

        Raises:
            OSError: the file cannot be read.
            ValueError: a line is no event of a trace.
        """
        if self.path is None or not self.path.is_file():
            return
        until = time.monotonic() + seconds
        with self._lock, self.path.open("rb") as file:
            self._size = file.seek(0, 2)
            if self._size < self._offset:
                self._forget()
                self._size = file.seek(0, 2)
            for event, end in _events(file, self._offset):
                self._take(event, end)
                self._offset = end
                if time.monotonic() > until:
                    return
            self._size = self._offset  # what is left is still being written

    def _take(self, event: Mapping[str, Any], end: int) -> None:
        attrs = event.get("args")
        if event.get("ph") == "M" and event.get("name") == "process_name" and isinstance(attrs, dict):
            self._names[event.get("pid", 0)] = str(attrs.get("name"))
        elif span := _span(event, self._names):
            self._take_span(span, end)

    def _take_span(self, span: "_Span", end: int) -> None:
        process, _, name, start, seconds, attrs = span
        rank, step = _RANK.fullmatch(process), attrs.get("rollout")
        if rank and name in ALONE:
            self._alone[rank[1], name][int(rank[2])] += seconds
        elif process == "driver" and name == _WHOLE_STEP and isinstance(step, int):
            # In the asynchronous loop a step's rollout may end before the step that comes before it.
            self._steps[step] = _Step(start, start + seconds, self._ends[0])
            self._ends = [self._ends[1], end]
            self._compare_ranks(step)

    def _compare_ranks(self, step: int) -> None:
        found: dict[tuple[str, int], str | None] = {}
        for (role, name), seconds in self._alone.items():
            slow = of_slow(seconds)
            for rank, own in seconds.items():
                usual = slow.get(rank, own)
                text = f"rank {rank} of the {role} takes {own:.3g} s for {name}, the others {usual:.3g} s"
                found[role, rank] = text if rank in slow else found.get((role, rank))
        self._alone.clear()
        for key, told in found.items():
            if key in self._ranks or told:
                self._ranks.setdefault(key, RuleState(SLOW_RANK, SLOW_RANK.metric)).judge(step, told)

    def alerts(self) -> list[Alert]:
        """Returns ranks that are slower than the others, as far as the file is read."""
        with self._lock:
            return [state.alert for state in self._ranks.values() if state.alert]

    def steps(self) -> dict[str, Any]:
        """Returns how many steps there are, the last of them, and the part of the file that is read."""
        with self._lock:
            read = self._offset / self._size if self._size else 1.0
            return {"count": len(self._steps), "steps": sorted(self._steps)[-LISTED:], "read": read}

    def step(self, number: int) -> dict[str, Any] | None:
        """Returns what each process did in a step, and when; None for a step that there is not.

        ``processes`` have the seconds of each of their spans without those within them, and how many were
        idle; ``spans`` are process, lane, name, seconds since the step began, duration and attributes.
        """
        with self._lock:
            found, names = self._steps.get(number), dict(self._names)
        if found is None or self.path is None:
            return None
        spans = list(_within(self.path, found, names))[
            ::-1
        ]  # of two with the same times the outer one ends later
        spans.sort(key=lambda span: (span[0], span[1], span[3], -span[4]))
        by_process: dict[str, list[_Span]] = defaultdict(list)
        for span in spans:
            if span[1] == 0 and (span[0], span[2]) != ("driver", _WHOLE_STEP):
                by_process[span[0]].append(span)
        whole = found.end - found.start
        return {
            "step": number,
            "seconds": whole,
            "processes": [
                {"name": name, "seconds": own_seconds(own), "idle": max(0.0, whole - covered(own))}
                for name, own in by_process.items()
            ],
            "spans": spans[:SHOWN_SPANS],
            "left_out": max(0, len(spans) - SHOWN_SPANS),
        }


_Span = tuple[str, int, str, float, float, dict[str, Any]]
"""Process, lane, name, start and duration in seconds, attributes."""


def _events(file: BinaryIO, offset: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields the events of complete lines, and the byte after each."""
    file.seek(offset)
    for line in file:
        if not line.endswith(b"\n"):  # still being written
            return
        offset += len(line)
        text = line.strip().rstrip(b",")
        if text in (b"[", b"]", b""):
            continue
        try:
            event = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise ValueError(
                f"{file.name}, byte {offset - len(line)}: no event of a trace ({error})"
            ) from error
        if isinstance(event, dict):
            yield event, offset


def _span(event: Mapping[str, Any], names: Mapping[int, str]) -> _Span | None:
    """The span that an event is; None of another kind, or of what is no span of ours."""
    pid, attrs = event.get("pid"), event.get("args")
    if event.get("ph") != "X" or not isinstance(pid, int) or not isinstance(attrs, dict):
        return None
    try:
        start, duration = float(event["ts"]) / 1e6, float(event["dur"]) / 1e6
        if not isfinite(start + duration):
            return None
        return names.get(pid, str(pid)), int(event["tid"]), str(event["name"]), start, duration, attrs
    except (KeyError, TypeError, ValueError):
        return None


def _within(path: Path, step: _Step, names: Mapping[int, str]) -> Iterator[_Span]:
    """The spans that overlap a step, of the bytes that may have them; what sticks out is cut off."""
    with path.open("rb") as file:
        for event, end in _events(file, step.first_byte):
            if end - step.first_byte > LARGEST_STEP:
                return
            if not (span := _span(event, names)):
                continue
            process, lane, name, begin, duration, attrs = span
            start, stop = max(begin, step.start), min(begin + duration, step.end)
            if stop > start:
                shown = {key: attrs[key] for key in _SHOWN if isinstance(attrs.get(key), int | float | str)}
                yield process, lane, name, start - step.start, stop - start, shown
            elif begin > step.end and name == _WHOLE_STEP:
                return


def own_seconds(spans: Iterable[_Span]) -> dict[str, float]:
    """Returns the seconds of each name without those of spans within, the longest first.

    Args:
        spans: of one lane, which nest or follow one another, by their start.
    """
    seconds: dict[str, float] = defaultdict(float)
    open_spans: list[tuple[str, float]] = []
    for _, _, name, start, duration, _ in spans:
        while open_spans and open_spans[-1][1] <= start:
            open_spans.pop()
        if open_spans:
            seconds[open_spans[-1][0]] -= duration
        seconds[name] += duration
        open_spans.append((name, start + duration))
    return dict(sorted(((n, max(0.0, s)) for n, s in seconds.items()), key=lambda item: -item[1]))


def covered(spans: Iterable[_Span]) -> float:
    """Returns the seconds in which there is a span, of spans by their start."""
    total, until = 0.0, 0.0
    for _, _, _, start, duration, _ in spans:
        total += max(0.0, start + duration - max(start, until))
        until = max(until, start + duration)
    return total
