"""What a disk takes without us, in turns with what is held against it."""

import os
from collections.abc import Callable
from pathlib import Path

_WRITTEN_AT_ONCE = 16 * 1024**2


def file_alone(total: int, directory: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    """What goes before a writer; and one of so many bytes in a new file, which does not wait for the disk.

    Before each writer nothing is left to be written, and memory for a file was in use a moment ago. A virtual
    machine gives memory back that is free for two seconds; having it again takes longer than writing to it.
    """
    memory, path = memoryview(b"1" * _WRITTEN_AT_ONCE), directory / "alone"

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            left = total
            while left:
                left -= file.write(memory[:left])

    def begin() -> None:
        os.sync()
        write()
        path.unlink()

    return begin, write
