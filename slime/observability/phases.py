"""The phases of a start on the screen: what is done, what has begun, and since when the command runs.

    phases.show("checking flags")                       # in the driver alone
    phases.reached("Ray is up", then="starting engines")
    phases.end()

    [  0:09] Ray is up; starting engines
    [  0:39] still starting engines

They end where the loop begins: from there on a row per step tells how far a run is.
"""

import sys
import threading
import time
from typing import TextIO

import psutil

_INTERVAL = 15.0  # seconds between two lines, where nothing is done


class Phases:
    """Prints lines, from a thread too while a phase lasts; none after ``end``."""

    def __init__(self, stream: TextIO, began: float, interval: float = _INTERVAL) -> None:
        self._stream, self._began, self._interval = stream, began, interval
        self._lock, self._changed = threading.Lock(), threading.Event()
        self._under_way = ""
        self._ended = False

    def begin(self, what: str) -> None:
        """Begins the first phase, which is told if it takes long."""
        self._under_way = what
        threading.Thread(target=self._remind, name="phases", daemon=True).start()

    def reached(self, done: str, then: str = "") -> None:
        """Says what is done and what has begun; without that nothing more comes."""
        with self._lock:
            if self._ended:
                return
            self._under_way = then
            self._print(f"{done}; {then}" if then else done)
            self._ended = not then
        self._changed.set()

    def end(self) -> None:
        """Whatever is printed from now on comes from somebody else."""
        with self._lock:
            self._ended = True
        self._changed.set()

    def _remind(self) -> None:
        while True:
            changed = self._changed.wait(self._interval)
            with self._lock:
                if self._ended:
                    return
                self._changed.clear()
                if not changed:
                    self._print(f"still {self._under_way}")

    def _print(self, text: str) -> None:
        minutes, seconds = divmod(int(time.time() - self._began), 60)
        self._stream.write(f"[{minutes:>3}:{seconds:02}] {text}\n")
        self._stream.flush()


_shown: Phases | None = None


def show(first: str) -> None:
    """Lets this process's phases be seen, on standard error."""
    global _shown
    _shown = Phases(sys.stderr, psutil.Process().create_time())
    _shown.begin(first)


def reached(done: str, then: str = "") -> None:
    """Says so, if this process shows its phases."""
    if _shown is not None:
        _shown.reached(done, then)


def end() -> None:
    """Ends the phases of this process, if it shows any; the last line of a run is to be its cause."""
    if _shown is not None:
        _shown.end()
