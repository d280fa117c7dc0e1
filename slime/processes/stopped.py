"""Processes that somebody has stopped (SIGSTOP): they live, and answer nobody."""

import time
from collections.abc import Iterable

from slime.processes.reaper import read_processes

STOPPED_LIMIT_S = 6.0
"""A shorter stop is forgiven: somebody may look at the process with a debugger."""
_LONGEST_GAP_S = 15.0
"""The longest gap between looks that say something about the time between them."""


def is_stopped(pid: int) -> bool:
    """Whether its state is T; a process that is gone is not."""
    return _state(pid) == b"T"


def is_running(pid: int) -> bool:
    """Whether it holds memory, stopped or not; what nobody has waited for (a zombie) does not."""
    return _state(pid) not in (b"", b"Z", b"X")


def _state(pid: int) -> bytes:
    """Its letter in the process table; empty if it is not there."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # What follows the command name, which may itself hold spaces and brackets.
            return file.read().rpartition(b")")[2].split()[0]
    except OSError:
        return b""


def _times_scheduled(pid: int) -> int:
    """How often its first thread has been taken off a CPU; 0 where the kernel does not say."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            return sum(int(line.split()[1]) for line in file if "ctxt_switches" in line)
    except OSError:
        return 0


def with_descendants(root: int) -> list[int]:
    """The process and all that runs below it."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in read_processes().items():
        children.setdefault(parent, []).append(pid)
    found = [root]
    for pid in found:  # grows meanwhile
        found += children.get(pid, [])
    return found


class StopClock:
    """Says for how long processes have been found stopped at every look, and have not run in between.

    It begins anew where nobody looked for more than 15 seconds: they may have run meanwhile. One that is
    stopped again and again, as by somebody who slows it, has been scheduled between two looks.
    """

    def __init__(self) -> None:
        self._since: dict[int, tuple[float, int]] = {}  # and how often it was scheduled before
        self._last_look = 0.0

    def overdue(self, stopped: Iterable[int], limit: float = STOPPED_LIMIT_S) -> dict[int, float]:
        """Seconds by process id, of those over the limit.

        Args:
            stopped: all that are stopped now.
        """
        now = time.monotonic()
        before = self._since if now - self._last_look <= _LONGEST_GAP_S else {}
        self._last_look, self._since = now, {}
        for pid in stopped:
            scheduled = _times_scheduled(pid)
            since, earlier = before.get(pid, (now, scheduled))
            self._since[pid] = since if scheduled == earlier else now, scheduled
        return {pid: now - since for pid, (since, _) in self._since.items() if now - since >= limit}
