"""What code in a local sandbox may use."""

from dataclasses import asdict, dataclass

MIB = 1 << 20


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
