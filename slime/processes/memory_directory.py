"""Directories in a file system in memory, which no run leaves behind.

    <parent>/slime_snapshots_9f3a17c2_4711_x3k/.in_use     locked as long as process 4711 lives

One is removed when its process ends, by a process that outlives it if it was killed, and, should that be
killed too, by the next one that makes one there.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slime.processes import reaper
from slime.processes.abandoned import LOCK, NEW, of_this_boot, remove_abandoned
from slime.processes.exclusive import DirectoryUnusable, exclusive


@contextmanager
def memory_directory(parent: Path, prefix: str, what: str, label: str = "") -> Iterator[Path]:
    """An empty directory for this process, while the context lasts.

    Args:
        prefix: of its name, by which those that others have left are known.
        what: named in messages, such as ``--trainer-snapshot-dir DIR``.
        label: a further part of its name.

    Raises:
        DirectoryUnusable: nothing can be written there.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(parent, prefix)
        made = Path(tempfile.mkdtemp(NEW, f"{of_this_boot(prefix)}{label}{os.getpid()}_", parent))
    except OSError as error:
        raise DirectoryUnusable(f"{what}: cannot be written to ({error.strerror})") from error
    path = made.with_suffix("")
    with exclusive(made / LOCK, what):
        made.rename(path)  # what has that name and no lock is nobody's
        _start_reaper(path)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _start_reaper(path: Path) -> None:
    command = [sys.executable, "-I", "-S", reaper.__file__, reaper.DIRECTORY, str(os.getpid()), str(path)]
    nothing = subprocess.DEVNULL
    subprocess.run(command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True, check=True)
