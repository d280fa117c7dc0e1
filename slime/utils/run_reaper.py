"""Ends what is left of a run on this machine once its driver is gone, however it went.

Ray's own processes end with their driver, but after a SIGKILL some of them wait for a minute for others
that are already dead. The reaper is a process in a session of its own at the other end of a pipe: when the
driver ends, the pipe closes, and everything that still carries the run's mark in its environment is killed.
"""

import os
import signal
import subprocess
import sys
import time
import uuid

MARK = "SLIME_RUN_MARK"
GRACE_S = 2.0
"""Seconds after the driver's end in which processes may end by themselves."""
PATIENCE_S = 10.0
"""Seconds in which new processes of the run are still looked for."""


def start_run_reaper() -> subprocess.Popen[bytes]:
    """Marks all processes that this one starts from now on, and starts their reaper.

    Keep the result: the reaper strikes when its standard input is closed.
    """
    mark = os.environ[MARK] = uuid.uuid4().hex
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, mark], stdin=subprocess.PIPE, start_new_session=True
    )


def marked_processes(mark: str) -> list[int]:
    """Process ids of all other processes with this mark in their environment."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as environ:
                if needle in environ.read().split(b"\0"):
                    found.append(int(name))
        except OSError:  # gone meanwhile, or another user's
            continue
    return found


def reap(mark: str) -> None:
    """Kills marked processes until none is left."""
    time.sleep(GRACE_S)
    deadline = time.monotonic() + PATIENCE_S
    while (pids := marked_processes(mark)) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    reap(sys.argv[1])
