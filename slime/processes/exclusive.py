"""Directories that only one process at a time may write to."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


class DirectoryUnusable(RuntimeError):
    """A directory cannot be used: another process holds its lock, or nothing can be written to it."""


@contextmanager
def exclusive(lock: Path, what: str) -> Iterator[None]:
    """Holds ``lock``, a file made for this purpose, while the context lasts or until its holder is dead.

    Args:
        what: named in messages, such as ``--save DIR``.

    Raises:
        DirectoryUnusable: with the reason, or the process that holds it.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("a+")
    except OSError as error:
        raise DirectoryUnusable(f"{what}: cannot be written to ({error.strerror})") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise DirectoryUnusable(
                f"{what}: in use by process {file.read().strip() or '?'} (wanted: another directory, or wait)"
            ) from error
        except OSError as error:  # some network file systems have no locks
            logger.warning("%s: cannot be locked (%s)", what, error.strerror)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
