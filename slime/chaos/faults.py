"""What is done to a process, and for how long."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from slime.chaos.connections import cut
from slime.chaos.lasting import GONE


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
    SLOW = "slow"
    """Stops the process for four fifths of the time, as on a machine that does too much."""
    CUT = "cut"
    """Ends all TCP connections that the process has, as a network does that loses them."""
    DESCRIPTORS = "descriptors"
    """Lets the process open a few more descriptors than it has, and then none."""
    MEMORY = "memory"
    """Lets the process map a little more memory than it has, and then none."""
    SHM = "shm"
    """Fills the shared memory of the machine but for a few MB; strikes no process."""


DEFAULT_KINDS = Kind.KILL, Kind.STOP, Kind.PAUSE
LASTS_S = {Kind.PAUSE: 3.0, Kind.SLOW: 20.0, Kind.DESCRIPTORS: 15.0, Kind.MEMORY: 15.0, Kind.SHM: 15.0}
"""Seconds after which a fault is undone. A pause is shorter than what the run takes for a stop."""
_SIGNALS = {Kind.KILL: signal.SIGKILL, Kind.STOP: signal.SIGSTOP, Kind.TERM: signal.SIGTERM}
# Isolated, and without site-packages: it is up in a moment.
_LASTING = "import sys; sys.path.insert(0, sys.argv.pop(1)); from slime.chaos.lasting import main; main()"
_ROOT = Path(__file__).parents[2]


def strike(kind: Kind, pid: int, lasts_s: Mapping[Kind, float] = LASTS_S) -> bool:
    """Returns whether the process was there, and, to be cut, had connections.

    Args:
        pid: for `Kind.SHM` of the run as a whole, at whose end it is undone.
    """
    if kind in lasts_s:
        return _strike_for(kind, pid, lasts_s[kind])
    try:
        if kind is Kind.CUT:
            return cut(pid) > 0
        os.kill(pid, _SIGNALS[kind])
    except ProcessLookupError:
        return False
    return True


def _strike_for(kind: Kind, pid: int, seconds: float) -> bool:
    """Returns once the fault is there, with somebody who undoes it: nobody's child, whom no death ends."""
    command = [sys.executable, "-I", "-S", "-c", _LASTING, str(_ROOT), kind, str(pid), str(os.getpid())]
    nothing = subprocess.DEVNULL
    done = subprocess.run([*command, str(seconds)], stdin=nothing, stdout=nothing, start_new_session=True)
    if done.returncode not in (0, GONE):
        raise RuntimeError(
            f"chaos: {kind} of process {pid} ended with exit status {done.returncode} (wanted: 0)"
        )
    return done.returncode == 0
