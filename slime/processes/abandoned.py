"""Directories that a process has locked, and those that one left behind when it died.

    <prefix>9f3a17c2_4711_x3k/.in_use     locked as long as process 4711 lives

The first part of the name is of the machine's boot: locks hold there, and what other machines have in a
directory that they share is left to them.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = ".in_use"
NEW = ".new"
"""The end of the name of one that is not locked yet."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MADE_WITHIN = 60.0  # seconds from a directory's first name to its lock


def of_this_boot(prefix: str) -> str:
    return f"{prefix}{_BOOT_ID.read_text()[:8]}_"


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Removes the directories whose processes have died."""
    for path in parent.glob(f"{of_this_boot(prefix)}*"):
        with suppress(OSError):  # in use, or gone meanwhile
            # Before anything in it is opened: another user may have put a link there.
            if (found := path.lstat()).st_uid == os.getuid() and not _is_being_made(path, found.st_mtime):
                with _unlocked(path):
                    shutil.rmtree(path, ignore_errors=True)


def _is_being_made(path: Path, modified: float) -> bool:
    """Whether its process may not have come to lock it yet."""
    return path.suffix == NEW and time.time() - modified < _MADE_WITHIN


@contextmanager
def _unlocked(path: Path) -> Iterator[None]:
    """Raises OSError if a process has it."""
    lock = path / LOCK
    if not lock.exists():
        yield
        return
    with lock.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
