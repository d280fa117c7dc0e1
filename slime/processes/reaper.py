"""Ends and removes what is left of a run on this machine once its driver is gone, however it went.

Ray's own processes end with their driver, but after a SIGKILL some of them wait for a minute for others
that are already dead. The reaper is a process in a session of its own at the other end of a pipe. While the
driver lives, it notes once a second what runs below the driver; when the pipe closes, it kills what is left
of that. A mark in the environment would not do: Ray's agents overwrite theirs with a title.

In a cluster that a run joins, nothing runs below its driver: each process that shares memory has a reaper of
its own there, which removes that memory when the process is gone.

Run as a plain file in isolated mode; it imports nothing but the standard library.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time

POLL_S = 1.0
GRACE_S = 2.0
"""Seconds after the driver's end in which processes may end by themselves."""
KILL_TIMEOUT_S = 10.0
"""Seconds in which children of what was killed are still looked for."""

SHARED_MEMORY = "/dev/shm"
_MEMORY = "--memory-of"
DIRECTORY = "--directory-of"
_ABSENT_S = 5.0
"""A directory that has not come back for so long does not: those who write there have ended."""
_LONGEST_S = 600.0
"""One that is still there then is left to the next run: it cannot be removed, or somebody writes there."""

Known = dict[int, int]
"""Process id to start time, which tells a process from a later one with the same id."""


def start_run_reaper() -> subprocess.Popen[bytes]:
    """Starts the reaper of this process's descendants.

    Keep the result: the reaper strikes when its standard input is closed.
    """
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def start_memory_reaper() -> None:
    """Starts what removes this process's shared memory of torch once it has died, however it went.

    Torch's own manager does that too, but it is a child: Ray kills those of a worker that ends. So this one
    is nobody's child.
    """
    command = [sys.executable, "-I", "-S", __file__, _MEMORY, str(os.getpid())]
    nothing = subprocess.DEVNULL
    subprocess.run(command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True, check=True)


def sweep_after(pid: int) -> None:
    """Waits for the end of a process and removes its shared memory."""
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(pid)], [], [])
    sweep({pid})


def remove_after(pid: int, path: str) -> None:
    """Waits for the end of a process and removes its directory; others of its run may still write there."""
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(pid)], [], [])
    seen = time.monotonic()
    deadline = seen + _LONGEST_S
    while time.monotonic() < min(seen + _ABSENT_S, deadline):
        if os.path.exists(path):
            seen = time.monotonic()
            shutil.rmtree(path, ignore_errors=True)
        time.sleep(0.1)


def read_processes() -> dict[int, tuple[int, int]]:
    """Parent and start time (in clock ticks since boot) of every living process."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                # What follows the command name, which may itself hold spaces and brackets.
                state, parent, *rest = file.read().rpartition(b")")[2].split()
        except OSError:  # gone meanwhile
            continue
        if state not in (b"Z", b"X"):
            found[int(entry)] = int(parent), int(rest[17])
    return found


def living(known: Known, root: int | None = None) -> Known:
    """Returns those of ``known`` that live, and all that runs below them or below ``root``, but not this
    process.
    """
    processes = read_processes()
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in processes.items():
        children.setdefault(parent, []).append(pid)
    pending = [pid for pid, start in known.items() if pid in processes and processes[pid][1] == start]
    found = {pid: processes[pid][1] for pid in pending}
    pending += [] if root is None else [root]
    while pending:
        for pid in children.get(pending.pop(), []):
            if pid not in found and pid != os.getpid():
                found[pid] = processes[pid][1]
                pending.append(pid)
    return found


def watch(driver: int) -> tuple[Known, set[int]]:
    """What ran below the driver once standard input has been closed, and all process ids seen until then."""
    known: Known = {}
    seen: set[int] = set()
    while not select.select([0], [], [], POLL_S)[0]:
        known = living(known, driver)
        seen |= known.keys()
    return known, seen


def reap(known: Known) -> None:
    """Kills what does not end by itself; returns at once when nothing is left."""
    deadline = time.monotonic() + GRACE_S
    while (known := living(known)) and time.monotonic() < deadline:
        time.sleep(0.1)
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (known := living(known)) and time.monotonic() < deadline:
        for pid in known:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)


def sweep(pids: set[int]) -> None:
    """Removes the shared memory of torch that dead processes left: only they would have done so."""
    dead = pids - read_processes().keys()
    for name in os.listdir(SHARED_MEMORY):
        owner = name.removeprefix("torch_").partition("_")[0]
        if name.startswith("torch_") and owner.isdigit() and int(owner) in dead:
            try:
                os.unlink(f"{SHARED_MEMORY}/{name}")
            except OSError:  # gone meanwhile, or of another user who had this process id
                continue


if __name__ == "__main__":
    if sys.argv[1] in (_MEMORY, DIRECTORY):
        if os.fork():
            os._exit(0)
        if sys.argv[1] == _MEMORY:
            sweep_after(int(sys.argv[2]))
        else:
            remove_after(int(sys.argv[2]), sys.argv[3])
    else:
        left, seen = watch(int(sys.argv[1]))
        reap(left)
        sweep(seen | left.keys())
