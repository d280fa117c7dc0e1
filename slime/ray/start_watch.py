"""Ray while it starts: what is stopped, or hangs, is named; calls of Ray's have long deadlines, or none.

with start_watch(150.0):
    ray.init()  # if that takes longer, or a process below this one is stopped, this process ends and says so
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slime.processes import termination
from slime.processes.reaper import living
from slime.processes.stopped import STOPPED_LIMIT_S, StopClock, is_running, is_stopped

_LOOK_INTERVAL = 1.0  # seconds
_WANTED = ("gcs_server", "raylet")


@contextmanager
def start_watch(
    seconds: float, interval: float = _LOOK_INTERVAL, stopped_limit: float = STOPPED_LIMIT_S
) -> Iterator[None]:
    """Within, ends this process, with a last line, once Ray does not start; the run's reaper ends the others.

    Args:
        seconds: that it may take.
        interval: seconds between two looks.
        stopped_limit: seconds for which a process may be stopped.
    """
    over, clock, began = threading.Event(), StopClock(), time.monotonic()

    def watch() -> None:
        while not over.wait(interval):
            reason = _stopped(clock, stopped_limit)
            if reason is None and time.monotonic() - began > seconds:
                reason = f"Ray has not started on this machine after {seconds:g} s: {_what_there_is()}"
            if reason is not None and not over.is_set() and not termination.was_terminated():
                termination.end(f"error: {reason}", status=1)
                return

    threading.Thread(target=watch, name="ray-start-watch", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _stopped(clock: StopClock, limit: float) -> str | None:
    overdue = clock.overdue([pid for pid in living({}, os.getpid()) if is_stopped(pid)], limit)
    for pid, seconds in overdue.items():
        told = f"{name_of(pid)} (process {pid}) is stopped (SIGSTOP), for {seconds:.0f} s now"
        return f"Ray does not start on this machine: {told}"
    return None


def _what_there_is() -> str:
    """Which of the processes that Ray needs there are: one that hangs is among them, or waited for."""
    names = {name_of(pid): pid for pid in living({}, os.getpid()) if is_running(pid)}
    return ", ".join(
        f"its {name} runs (process {names[name]})" if name in names else f"its {name} does not run"
        for name in _WANTED
    )


def name_of(pid: int) -> str:
    """What a process runs: the file of its program, or of its script."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        words = [""]
    program = Path(words[0]).name
    scripts = [Path(word).name for word in words[1:] if word.endswith(".py")]
    return scripts[0] if program.startswith("python") and scripts else program or "a process"
