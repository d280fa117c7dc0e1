"""Ends the server when the process it works for is gone."""

import logging
import os
import threading
import time

logger = logging.getLogger(__name__)
PARENT_VARIABLE = "SLIME_PARENT_PID"
_PERIOD_SECONDS = 1.0


def watch_parent() -> None:
    """Starts a watching thread if ``SLIME_PARENT_PID`` names a process to live and die with."""
    value = os.environ.get(PARENT_VARIABLE)
    if value is None:
        return
    if not value.isdecimal():
        raise ValueError(f"{PARENT_VARIABLE}={value!r}: wanted a process id")
    threading.Thread(target=_watch, args=(int(value),), name="parent-watch", daemon=True).start()


def _watch(pid: int) -> None:
    while process_exists(pid):
        time.sleep(_PERIOD_SECONDS)
    logger.error("the parent process %d is gone: exiting", pid)
    os._exit(1)


def process_exists(pid: int) -> bool:
    """False for a zombie too: it is over, even if nobody has collected it yet."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        if not os.path.isdir("/proc/self"):
            return _answers_signal(pid)
        return False


def _answers_signal(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
