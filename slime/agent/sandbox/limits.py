"""What code in a local sandbox may use, and the control group that holds all its processes to the memory."""

import contextlib
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

MIB = 1 << 20
_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_REMOVAL_S = 2.0


@dataclass(frozen=True)
class Limits:
    """The limits of a local sandbox.

    Attributes:
        memory_bytes: address space of each process; of all together where the machine has a cgroup for it.
        cpu_s: processor seconds of each process.
        total_cpu_s: of all processes of all commands together; then they end, and no other is started.
        file_bytes: of one file.
        disk_bytes: of all files, held by the sandbox's own file system only.
        processes: at a time, threads included.
        open_files: of each process.
        output_bytes: kept of what a command writes; one that writes 64 times as much is killed.
    """

    memory_bytes: int = 1024 * MIB
    cpu_s: int = 60
    total_cpu_s: int = 3600
    file_bytes: int = 64 * MIB
    disk_bytes: int = 256 * MIB
    processes: int = 64
    open_files: int = 256
    output_bytes: int = 64 << 10

    def __post_init__(self) -> None:
        wrong = {name: value for name, value in asdict(self).items() if value < 1}
        if wrong:
            raise ValueError(f"limits {wrong}: wanted at least 1")


@dataclass
class ControlGroup:
    """A control group: processes that are put into it stay in it, and so do their children."""

    path: Path

    @classmethod
    def of(cls, name: str, pid: int, memory_bytes: int) -> "ControlGroup":
        """Returns a new group with this process in it; version 2 of the interface, else version 1.

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
        """Removes the group once its processes have ended."""
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
