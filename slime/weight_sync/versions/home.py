"""A follower's directory on its machine: one process has it, and tells itself apart by it."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slime.processes.exclusive import DirectoryUnusable, exclusive

_LOCK = ".followed"
_NAME = ".follower"


@contextmanager
def home_of(local: Path) -> Iterator[str]:
    """Holds the directory until the block or the process ends; yields a name that no other one has.

    It is the same when the follower is started again, and another one when the machine is, or where somebody
    has copied the directory to another one.

    Raises:
        DirectoryUnusable: another process has it, which is named, or nothing can be written there.
    """
    what = f"--local-checkpoint-dir {local}"
    with exclusive(local / _LOCK, what):
        try:
            name = _kept(local / _NAME)
        except OSError as error:
            raise DirectoryUnusable(f"{what}: {error}") from error
        yield f"{name}@{machine()}"


def machine() -> str:
    """A name that processes share which reach the same servers by 127.0.0.1; "" where that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


def _kept(file: Path) -> str:
    if file.exists() and (name := file.read_text().strip()):
        return name
    name = uuid.uuid4().hex
    file.write_text(name)
    return name
