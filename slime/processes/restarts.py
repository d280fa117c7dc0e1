"""A command that is started again when it fails, as long as it gets on."""

import ctypes
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from slime.processes import termination
from slime.processes.signal_flag import SignalFlag
from slime.processes.stopped import STOPPED_LIMIT_S, StopClock, is_stopped

BAD_FLAGS, INTERRUPTED = 2, 128 + signal.SIGINT
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
_LOOK_S = 1.0


class Restarts:
    """Runs a command until it succeeds, is told to end, or fails too often without getting on.

    SIGTERM and Ctrl-C are handed on to it, and end it for good. It has a session of its own, so that a
    terminal tells it nothing twice, and is sent SIGTERM when this process dies. One that somebody has stopped
    (SIGSTOP) for six seconds is killed: it would never end.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        progress: Callable[[], object],
        limit: int,
        first_pause_s: float = FIRST_PAUSE_S,
        stopped_limit_s: float = STOPPED_LIMIT_S,
    ) -> None:
        """
        Args:
            progress: what differs after a failure if the command has got on meanwhile.
            limit: of starts after failures in a row between which it has not got on.
            first_pause_s: seconds before the first of these; each is twice as long as the one before.
            stopped_limit_s: seconds after which a command that is stopped is killed.
        """
        self._command, self._environment = list(command), dict(environment)
        self._progress, self._limit, self._first_pause_s = progress, limit, first_pause_s
        self._stopped_limit_s = stopped_limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._told: int | None = None
        self._stop = SignalFlag()

    def run(self) -> int:
        """Returns the exit status of the last start; of a signal, 128 and its number. In the main thread."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._hand_on)
        failures, ends = 0, {0, BAD_FLAGS, INTERRUPTED, termination.STATUS}
        while True:
            before = self._progress()
            status = self._start_once()
            if self._told or status in ends:
                return status
            # From now on it may also mean a port or a directory that the start before has not let go of yet.
            ends.discard(BAD_FLAGS)
            failures = 1 if self._progress() != before else failures + 1
            if failures > self._limit:
                _fail(f"the run {_ended(status)}, {failures} times in a row without a new checkpoint")
                return status
            pause = min(self._first_pause_s * 2 ** (failures - 1), LONGEST_PAUSE_S)
            _say(f"the run {_ended(status)}: it starts again in {pause:g} s ({failures} of {self._limit})")
            if self._stop.wait(pause):
                return 128 + (self._told or 0)

    def _start_once(self) -> int:
        self._process = subprocess.Popen(
            self._command, env=self._environment, start_new_session=True, preexec_fn=end_with_parent
        )
        if self._told:  # while it was started
            self._process.send_signal(self._told)
        status = self._wait(self._process)
        return status if status >= 0 else 128 - status

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        clock = StopClock()
        while True:
            try:
                return process.wait(_LOOK_S)
            except subprocess.TimeoutExpired:
                stopped = [process.pid] if is_stopped(process.pid) else []
                if clock.overdue(stopped, self._stopped_limit_s):
                    _say(f"the run is stopped (SIGSTOP), for {self._stopped_limit_s:g} s now: it is killed")
                    process.kill()

    def _hand_on(self, signum: int, frame: FrameType | None) -> None:
        self._told = signum
        self._stop.set()
        if self._process is not None:
            self._process.send_signal(signum)


def end_with_parent() -> None:
    """Has this process, a child before its ``execve``, sent SIGTERM when its parent dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _ended(status: int) -> str:
    if status <= 128:
        return f"ended with exit status {status}"
    number = status - 128
    return f"was killed by {signal.Signals(number).name if number in set(signal.Signals) else number}"


def _say(line: str) -> None:
    print(f"supervisor: {line}", file=sys.stderr, flush=True)


def _fail(line: str) -> None:
    """Says it as every command's last line of a failure."""
    print(f"error: {line}", file=sys.stderr, flush=True)
