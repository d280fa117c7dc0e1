"""Wall-clock seconds of named phases of one process."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from slime.observability.spans import SpanList


class Timer:
    """Accumulates seconds per phase until `take` empties it.

    Attributes:
        spans: when each of them was.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self.spans = SpanList()

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Adds the seconds of the block to ``name``; blocks of different names may nest."""
        start = time.monotonic()
        try:
            with self.spans.measure(name):
                yield
        finally:
            self._seconds[name] += time.monotonic() - start

    def take(self) -> dict[str, float]:
        """The seconds so far, by phase; counting starts again from nothing."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds
