"""What is done to a process."""

import os
import signal
import threading
from contextlib import suppress
from enum import StrEnum

PAUSE_S = 5.0
"""Seconds after which a paused process goes on: less than what the run takes for a stop."""


class Kind(StrEnum):
    """A way to disturb a process."""

    KILL = "kill"
    """Sends SIGKILL: the process dies at once, as by the kernel for want of memory."""
    STOP = "stop"
    """Sends SIGSTOP: the process lives and never answers again, as one that hangs."""
    PAUSE = "pause"
    """Stops the process for 5 seconds, as on a machine that swaps: nothing should come of it."""


def strike(kind: Kind, pid: int) -> bool:
    """Returns whether the process was there."""
    try:
        os.kill(pid, signal.SIGKILL if kind is Kind.KILL else signal.SIGSTOP)
    except ProcessLookupError:
        return False
    if kind is Kind.PAUSE:
        waker = threading.Timer(PAUSE_S, _wake, [pid])
        waker.daemon = True
        waker.start()
    return True


def _wake(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
