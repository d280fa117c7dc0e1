"""Which trainer writes versions into a directory: the one that came last, and none before it."""

import os
from pathlib import Path

from slime.weight_sync.writer import replaced

WRITERS = ".writers"
"""A file with a line for each trainer that came; the last one has the directory."""


class DirectoryTaken(RuntimeError):
    """Another trainer writes into the directory since."""


def take_directory(root: Path, writer: str) -> None:
    """Has this trainer alone write into a directory, which is made, until another one takes it.

    Raises:
        DirectoryTaken: another one has come after it.
        OSError: the directory cannot be written.
    """
    root.mkdir(parents=True, exist_ok=True)
    if writer in _writers(root):
        require_directory(root, writer)
        return
    with open(root / WRITERS, "a") as file:
        file.write(f"\n{writer}\n")  # the line before may be torn
        file.flush()
        os.fsync(file.fileno())


def require_directory(root: Path, writer: str) -> None:
    """Makes one that somebody has removed anew.

    Raises:
        DirectoryTaken: another one has come after this trainer.
        OSError: the directory cannot be read.
    """
    known = _writers(root)
    if not known:
        take_directory(root, writer)
    elif known[-1] != writer:
        raise DirectoryTaken(f"--update-weight-disk-dir {root}: {replaced(writer, known[-1])}")


def is_taken_by(root: Path, writer: str) -> bool:
    """Whether a directory is there, and this trainer's.

    Raises:
        OSError: the directory cannot be read.
    """
    return _writers(root)[-1:] == [writer]


def _writers(root: Path) -> list[str]:
    try:
        return (root / WRITERS).read_text(errors="replace").split()
    except FileNotFoundError:
        return []
