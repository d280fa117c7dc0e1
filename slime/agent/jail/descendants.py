"""All processes that come from this one: their end, and the processor time that they have used.

A daemon leaves its parent, its session and its group, but comes back to process 1 of its namespace, or before
that to an ancestor that has asked for such orphans.
"""

import contextlib
import os
import resource
import signal
import time
from collections.abc import Iterator
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_PAUSE_S = 0.001


class _Row(NamedTuple):
    """A process as ``/proc`` has it; seconds are its own and those of its children that it has waited for."""

    pid: int
    parent: int
    state: str
    own_s: float
    waited_s: float
    start: int


class Descendants:
    """The descendants of the calling process, which adopts orphans: process 1, or one that called
    ``kernel.adopt_orphans``.

    Args:
        alone: whether it is process 1, and all others in its namespace come from it.
    """

    def __init__(self, alone: bool) -> None:
        self._alone = alone
        self._seen: dict[tuple[int, int], float] = {}

    def kill(self) -> None:
        """End them all, those that are started meanwhile included, and wait until they are gone."""
        if self._alone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            while _bury(0):
                pass
            return
        while self.bury():
            # A process that stands still starts no other.
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for row in self._alive():
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(row.pid, number)
            time.sleep(_PAUSE_S)

    def bury(self) -> bool:
        """Take leave of those that have ended; whether there are others."""
        while ended := _bury(os.WNOHANG):
            pass
        return ended is not None

    def used_s(self) -> float:
        """Processor seconds of all of them so far.

        The kernel adds up those of children that somebody waits for. A process may have it forget its
        children, so what was seen of each at the last look is added up as well; the larger sum counts.
        """
        reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
        alive = list(self._alive())
        self._seen |= {(row.pid, row.start): row.own_s for row in alive}
        waited_for = reaped.ru_utime + reaped.ru_stime + sum(row.own_s + row.waited_s for row in alive)
        return max(waited_for, sum(self._seen.values()))

    def _alive(self) -> Iterator[_Row]:
        """Yields the processes that are no zombies; none where there is no ``/proc``."""
        rows = list(_rows())
        own = {os.getpid()}
        while grown := [row for row in rows if row.parent in own and row.pid not in own]:
            own |= {row.pid for row in grown}
            yield from (row for row in grown if row.state != "Z")


def _bury(options: int) -> int | None:
    """A child that has ended; 0 if none has yet, None if there is none."""
    try:
        return os.waitpid(-1, options)[0]
    except ChildProcessError:
        return None


def _rows() -> Iterator[_Row]:
    try:
        names = os.listdir("/proc")
    except FileNotFoundError:
        return
    for name in names:
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            # The name of a program may hold anything, a parenthesis too.
            fields = file.read().rpartition(b")")[2].split()
            own, waited = (sum(map(int, fields[at : at + 2])) / _TICKS for at in (11, 13))
            yield _Row(int(name), int(fields[1]), fields[0].decode(), own, waited, int(fields[19]))
