"""Disks without room and processes without memory, real ones, where this machine lets a test make them."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A disk of this size (``512k``) at a place that is made for it."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this user may not mount a disk: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


class MemoryGroup:
    """A control group, whose processes the kernel kills once they have more memory than its limit."""

    def __init__(self, place: Path) -> None:
        self.processes = place / "cgroup.procs"

    def take(self, pid: int) -> None:
        """What the process has from now on is counted."""
        self.processes.write_text(str(pid))


@contextmanager
def memory_group(name: str, limit: int) -> Iterator[MemoryGroup]:
    """A control group with a limit in bytes."""
    own, file, swap = _own_group()
    place = own / name
    try:
        place.mkdir()
        (place / file).write_text(str(limit))
    except OSError as error:
        with suppress(OSError):
            place.rmdir()
        pytest.skip(f"this user may not make a control group of memory: {error}")
    with suppress(OSError):  # a kernel without swap has no such file
        (place / swap).write_text(str(limit if swap.startswith("memory.memsw") else 0))
    try:
        yield MemoryGroup(place)
    finally:
        _remove(place)


def _own_group() -> tuple[Path, str, str]:
    """This process's group, and the files with the limits of memory and swap in one: of version 1 or 2."""
    root, path = Path("/sys/fs/cgroup"), "/"
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            own = root / "memory" / path.lstrip("/")
            return own, "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
    return root / path.lstrip("/"), "memory.max", "memory.swap.max"


def _remove(place: Path, timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while place.is_dir():
        try:
            place.rmdir()
        except OSError:  # processes are still leaving it
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
