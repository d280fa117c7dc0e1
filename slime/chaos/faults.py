"""What is done to a process."""

import os
import signal
import subprocess
import sys
from enum import StrEnum

PAUSE_S = 3.0
"""Seconds after which a paused process goes on: less than what the run takes for a stop."""


class Kind(StrEnum):
    """A way to disturb a process."""

    KILL = "kill"
    """Sends SIGKILL: the process dies at once, as by the kernel for want of memory."""
    STOP = "stop"
    """Sends SIGSTOP: the process lives and never answers again, as one that hangs."""
    PAUSE = "pause"
    """Stops the process for 3 seconds, as on a machine that swaps: nothing should come of it."""
    TERM = "term"
    """Sends SIGTERM, as a scheduler that wants its machine back: the process may put its things away."""


DEFAULT_KINDS = Kind.KILL, Kind.STOP, Kind.PAUSE
_SIGNALS = {
    Kind.KILL: signal.SIGKILL,
    Kind.STOP: signal.SIGSTOP,
    Kind.PAUSE: signal.SIGSTOP,
    Kind.TERM: signal.SIGTERM,
}


def strike(kind: Kind, pid: int) -> bool:
    """Returns whether the process was there."""
    if kind is Kind.PAUSE:
        _will_wake(pid)
    try:
        os.kill(pid, _SIGNALS[kind])
    except ProcessLookupError:
        return False
    return True


# It is nobody's child, and so lives on if this process is killed meanwhile.
_WAKER = """
import os, signal, sys, time
try:
    handle = os.pidfd_open(int(sys.argv[1]))  # nobody else, though they had its id by then
except ProcessLookupError:
    sys.exit()
if os.fork():
    os._exit(0)
time.sleep(float(sys.argv[2]))
try:
    signal.pidfd_send_signal(handle, signal.SIGCONT)
except ProcessLookupError:
    pass
"""


def _will_wake(pid: int) -> None:
    """Returns once somebody is there who lets the process go on when its pause is over."""
    command = [sys.executable, "-I", "-S", "-c", _WAKER, str(pid), str(PAUSE_S)]
    nothing = subprocess.DEVNULL
    subprocess.run(command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True, check=True)
