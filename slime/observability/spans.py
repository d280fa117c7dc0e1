"""Spans of all processes of a run, and one file of them in Chrome's trace format (``--trace``).

Perfetto (https://ui.perfetto.dev) and ``chrome://tracing`` open it, also while the run goes on: the
format lets the array of events end anywhere.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # whoever reads spans does without numpy
    from slime.utils.types import Sample

DRIVER = "driver"
START, STEP, END = PARTS = ("start", "step", "end")
"""Spans of the driver that divide a run: each begins where the one before it ended."""


@dataclass(frozen=True)
class Span:
    """A piece of a process's time.

    Attributes:
        start, end: in seconds since the epoch.
        lane: spans of one lane nest or follow one another; 0 for what a process does by itself.
        attrs: what a viewer shows beside it.
    """

    name: str
    start: float
    end: float
    lane: int = 0
    attrs: Mapping[str, Any] = field(default_factory=dict)


class SpanList:
    """The spans that a process has measured and nobody has taken yet."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    @contextmanager
    def measure(self, name: str, lane: int = 0, **attrs: Any) -> Iterator[None]:
        """Measures the block as a span; one of another thread needs a lane of its own."""
        start = time.time()
        try:
            yield
        finally:
            self._spans.append(Span(name, start, time.time(), lane, attrs))

    def take(self) -> list[Span]:
        """Returns the spans so far; the list is empty afterwards."""
        spans, self._spans = self._spans, []
        return spans


class SpanSink(Protocol):
    """A destination of spans."""

    def write(self, process: str, spans: Iterable[Span]) -> None: ...

    def close(self) -> None: ...


class TraceFile:
    """Writes spans to a file, which a resumed run continues."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        if self._file.tell() == 0:
            self._file.write("[\n")
        self._processes: dict[str, int] = {}

    def write(self, process: str, spans: Iterable[Span]) -> None:
        """Adds the spans of a process, and its name when it is new."""
        if process not in self._processes:
            # Another number than in the run that this one continues: the viewer would mix their lanes.
            self._processes[process] = os.getpid() * 1000 + len(self._processes)
            self._event(process, ph="M", name="process_name", args={"name": process})
        for span in spans:
            times = {"ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6}
            self._event(process, ph="X", name=span.name, tid=span.lane, args=dict(span.attrs), **times)
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _event(self, process: str, **event: Any) -> None:
        self._file.write(json.dumps({"pid": self._processes[process], **event}, default=str) + ",\n")


def sample_spans(samples: "Iterable[Sample]") -> list[Span]:
    """Returns the finished spans of samples' traces (`trace_utils`).

    Samples that overlap in time get lanes of their own.
    """
    lives = [spans for sample in samples if (spans := _spans_of(sample))]
    lives.sort(key=lambda spans: min(span.start for span in spans))
    free_from: list[float] = []
    placed: list[Span] = []
    for spans in lives:
        start, end = min(span.start for span in spans), max(span.end for span in spans)
        lane = next((i for i, since in enumerate(free_from) if since <= start), len(free_from))
        free_from[lane : lane + 1] = [end]
        placed += [Span(span.name, span.start, span.end, lane + 1, span.attrs) for span in spans]
    return placed


def _spans_of(sample: "Sample") -> list[Span]:
    opened: dict[str, Mapping[str, Any]] = {}
    spans = []
    for event in getattr(sample, "trace", {}).get("events", ()):
        if event["type"] == "span_start":
            opened[event["span_id"]] = event
        elif event["type"] == "span_end" and (begun := opened.pop(event["span_id"], None)):
            attrs = {"group": event["group_id"], "sample": event["sample_id"]}
            attrs |= {"attempt": event["attempt"]} | begun["attrs"] | event["attrs"]
            spans.append(Span(event["name"], begun["ts"], event["ts"], attrs=attrs))
    return spans
