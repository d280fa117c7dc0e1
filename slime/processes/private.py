"""Directories below a shared one, such as ``/tmp``, and files that nobody else can read or has prepared."""

import logging
import os
import shutil
import stat
import time
from pathlib import Path

logger = logging.getLogger(__name__)

_DAY_S = 86400.0


class DirectoryNotOurs(RuntimeError):
    """Somebody else made it, or it is a link."""


def private_directory(path: Path) -> Path:
    """Makes the directory with mode 0700, or checks the one that is there.

    Raises:
        DirectoryNotOurs: it is not a directory, a link, or another user's.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise DirectoryNotOurs(
                f"{path}: no directory of user {os.getuid()} (wanted: remove it, or another TMPDIR)"
            ) from None
        if stat.S_IMODE(found.st_mode) != 0o700:
            path.chmod(0o700)
    return path


def write_private(path: Path, text: str) -> None:
    """Writes a file with mode 0600, as a whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    os.replace(partial, path)


def remove_older(path: Path, days: float) -> None:
    """Removes what lies in the directory and in which nothing has changed for so long."""
    oldest = time.time() - days * _DAY_S
    for entry in path.iterdir():
        try:
            if entry.lstat().st_mtime > oldest or _newest(entry) > oldest:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        except FileNotFoundError:  # another run removes it too
            continue
        except OSError as error:
            logger.warning("%s is old and cannot be removed: %s", entry, error)


def _newest(entry: Path) -> float:
    below = entry.rglob("*") if entry.is_dir() and not entry.is_symlink() else ()
    return max((file.lstat().st_mtime for file in below), default=0.0)
