"""A control group for the memory of all processes of a sandbox together, where this process may make one."""

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_REMOVAL_S = 2.0


@dataclass
class ControlGroup:
    """A folder of the kernel's; processes that are put into it keep it, and so do their children."""

    path: Path

    @classmethod
    def of(cls, name: str, pid: int, memory_bytes: int) -> "ControlGroup":
        """A new group with this process in it; version 2 of the interface, else version 1.

        Raises:
            OSError: neither can be written here, or has no control of memory.
        """
        failures = []
        for parent, limit in _candidates():
            group = cls(parent / name)
            try:
                group.path.mkdir()
                (group.path / limit).write_text(str(memory_bytes))
                (group.path / "cgroup.procs").write_text(str(pid))
                return group
            except OSError as error:
                failures.append(str(error))
                group.remove()
        raise OSError("; ".join(failures) or f"no memory controller below {_ROOT}")

    def remove(self) -> None:
        """Once its processes have ended."""
        deadline = time.monotonic() + _REMOVAL_S
        while self.path.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                os.rmdir(self.path)
                return
            time.sleep(0.01)


def _candidates() -> list[tuple[Path, str]]:
    found = []
    for line in _OWN.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers and (_ROOT / "cgroup.controllers").exists():
            found.append((_ROOT / path.strip("/"), "memory.max"))
        elif "memory" in controllers.split(","):
            found.append((_ROOT / "memory" / path.strip("/"), "memory.limit_in_bytes"))
    return found
