"""How much of the host's memory is left for this process and its neighbours."""

from pathlib import Path
from typing import NamedTuple

import psutil

_CGROUP = Path("/sys/fs/cgroup")


class HostMemory(NamedTuple):
    """Host memory in bytes; ``available`` without swapping, what caches of files hold counted in."""

    total: int
    available: int


def host_memory() -> HostMemory:
    """Returns the memory of the machine or, where that is less, what the container may use."""
    machine = psutil.virtual_memory()
    own = container_memory(_CGROUP)
    if own is None or own.total > machine.total:
        return HostMemory(machine.total, machine.available)
    return HostMemory(own.total, min(own.available, machine.available))


def container_memory(root: Path) -> HostMemory | None:
    """Returns the memory of this process's control group, which containers see at ``root``.

    None if it has no limit.
    """
    second = [root / name for name in ("memory.max", "memory.current", "memory.stat")]
    first = [root / "memory" / f"memory.{name}" for name in ("limit_in_bytes", "usage_in_bytes", "stat")]
    for limit, usage, stat in (second, first):
        try:
            total, used = int(limit.read_text()), int(usage.read_text())
            counts = dict(line.split() for line in stat.read_text().splitlines())
        except (OSError, ValueError):  # not there, or "max"
            continue
        files = int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))
        return HostMemory(total, max(0, total - used + files))
    return None
