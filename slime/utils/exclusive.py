"""Directories that only one process at a time may write to."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


class DirectoryInUse(RuntimeError):
    """Another process holds the lock."""


@contextmanager
def exclusive(lock: Path, what: str) -> Iterator[None]:
    """Holds ``lock``, a file made for this purpose, while the context lasts or until its holder is dead.

    Args:
        what: named in messages, such as ``--save DIR``.

    Raises:
        DirectoryInUse: by which process.
        OSError: the file cannot be made.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("a+")
    except OSError as error:
        raise OSError(f"{what}: cannot be written to ({error.strerror})") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise DirectoryInUse(
                f"{what}: in use by process {file.read().strip() or '?'} (wanted: another directory, or wait)"
            ) from error
        except OSError as error:  # some network file systems have no locks
            logger.warning("%s: cannot be locked (%s)", what, error.strerror)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
