"""Directories in a file system in memory, which no run leaves behind.

    <parent>/slime_snapshots_4711_x3k/.in_use     locked as long as the run's driver lives

One is removed when its run ends, by a process that outlives the driver if this was killed, and, should that
be killed too, by the next run that makes one there.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slime.processes import reaper
from slime.processes.exclusive import DirectoryUnusable, exclusive

_LOCK, _NEW = ".in_use", ".new"


@contextmanager
def memory_directory(parent: Path, prefix: str, what: str) -> Iterator[Path]:
    """An empty directory for this process, while the context lasts.

    Args:
        prefix: of its name, by which those that others have left are known.
        what: named in messages, such as ``--trainer-snapshot-dir DIR``.

    Raises:
        DirectoryUnusable: nothing can be written there.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(parent, prefix)
        made = Path(tempfile.mkdtemp(_NEW, f"{prefix}{os.getpid()}_", parent))
    except OSError as error:
        raise DirectoryUnusable(f"{what}: cannot be written to ({error.strerror})") from error
    path = made.with_suffix("")
    with exclusive(made / _LOCK, what):
        made.rename(path)  # what has that name and no lock is nobody's
        _start_reaper(path)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Removes the directories whose processes have died."""
    for path in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # in use, or gone meanwhile
            # Before anything in it is opened: another user may have put a link there.
            if path.lstat().st_uid == os.getuid():
                with _unlocked(path):
                    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _unlocked(path: Path) -> Iterator[None]:
    """Raises OSError if a process has it."""
    lock = path / _LOCK
    if not lock.exists():
        yield
        return
    with lock.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _start_reaper(path: Path) -> None:
    command = [sys.executable, "-I", "-S", reaper.__file__, reaper.DIRECTORY, str(os.getpid()), str(path)]
    nothing = subprocess.DEVNULL
    subprocess.run(command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True, check=True)
