"""A fault that is undone after its time, or as soon as its victim or who struck has gone.

Each has a process of its own that is nobody's child, so that nothing which ends others ends it too early. It
imports nothing but small modules of the standard library.
"""

import contextlib
import errno
import itertools
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from slime.processes.reaper import SHARED_MEMORY, living, read_processes

GONE = 3
"""Exit status if the victim is."""
SPARE_DESCRIPTORS = 4
SPARE_MEMORY = 16 << 20
SPARE_SHARED_MEMORY = 4 << 20
_TICK_S = 0.1
_TICKS_OF_A_CYCLE = 5
"""A slow process runs in one of them."""
_TICKS_OF_A_LOOK = 5

Tick = Callable[[int], None]
"""Is called with 0, 1, 2, ... while a fault lasts."""


def main() -> None:
    """Returns once the fault is there; the process that undoes it goes on.

    Command line: kind, victim, who strikes, seconds.
    """
    kind, (victim, striker), seconds = sys.argv[1], map(int, sys.argv[2:4]), float(sys.argv[4])
    with contextlib.ExitStack() as stack:
        try:
            ends = [os.pidfd_open(pid) for pid in (victim, striker)]
            tick = stack.enter_context(_FAULTS[kind](victim, ends[0]))
        except ProcessLookupError:
            sys.exit(GONE)
        if os.fork():
            os._exit(0)
        until = time.monotonic() + seconds
        for number in itertools.count():
            if time.monotonic() > until or select.select(ends, [], [], _TICK_S)[0]:
                break
            tick(number)


@contextmanager
def paused(victim: int, handle: int) -> Iterator[Tick]:
    """Stops a process."""
    try:
        signal.pidfd_send_signal(handle, signal.SIGSTOP)
        yield lambda number: None
    finally:
        _go_on(handle)


@contextmanager
def slowed(victim: int, handle: int) -> Iterator[Tick]:
    """Stops a process for all but the last tick of each cycle."""

    def tick(number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            stops = (number + 1) % _TICKS_OF_A_CYCLE
            signal.pidfd_send_signal(handle, signal.SIGSTOP if stops else signal.SIGCONT)

    try:
        signal.pidfd_send_signal(handle, signal.SIGSTOP)
        yield tick
    finally:
        _go_on(handle)


def _go_on(handle: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signal.SIGCONT)


@contextmanager
def limited(victim: int, what: int, most: Callable[[int], int]) -> Iterator[Tick]:
    """Lowers the limit of a process, which those that it starts meanwhile inherit.

    Args:
        what: one of `resource`.
        most: the limit, for a process id.

    Raises:
        ProcessLookupError: it is gone.
    """
    if (entry := read_processes().get(victim)) is None:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    known = {victim: entry[1]}
    try:
        lowered = most(victim)
    except FileNotFoundError as error:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from error
    soft, hard = resource.prlimit(victim, what)
    if soft != resource.RLIM_INFINITY:
        lowered = min(lowered, soft)
    resource.prlimit(victim, what, (lowered, hard))

    def tick(number: int) -> None:
        nonlocal known
        if number % _TICKS_OF_A_LOOK == 0:
            known = living(known)

    try:
        yield tick
    finally:
        for pid in living(known):
            with contextlib.suppress(ProcessLookupError):
                if resource.prlimit(pid, what) == (lowered, hard):
                    resource.prlimit(pid, what, (soft, hard))


def _few_descriptors(victim: int) -> int:
    """A limit that leaves as many numbers free as may be opened: those above it stay open."""
    taken = set(map(int, os.listdir(f"/proc/{victim}/fd")))
    free = (number for number in itertools.count() if number not in taken)
    return next(itertools.islice(free, SPARE_DESCRIPTORS, None))


def _little_memory(victim: int) -> int:
    with open(f"/proc/{victim}/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize() + SPARE_MEMORY


@contextmanager
def full(directory: str) -> Iterator[Tick]:
    """Fills a file system of memory, with a file that has no name: it is gone with who has it open."""
    file = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
    size = 0

    def tick(number: int) -> None:
        nonlocal size
        system = os.statvfs(directory)
        more = system.f_bavail * system.f_frsize - SPARE_SHARED_MEMORY
        if more > 0:
            with contextlib.suppress(OSError):  # others were faster: at the next tick
                os.posix_fallocate(file, size, more)
                size += more

    try:
        tick(0)
        yield tick
    finally:
        os.close(file)


_FAULTS: dict[str, Callable[[int, int], AbstractContextManager[Tick]]] = {
    "pause": paused,
    "slow": slowed,
    "descriptors": lambda victim, handle: limited(victim, resource.RLIMIT_NOFILE, _few_descriptors),
    "memory": lambda victim, handle: limited(victim, resource.RLIMIT_AS, _little_memory),
    "shm": lambda victim, handle: full(SHARED_MEMORY),
}
