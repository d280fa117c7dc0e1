"""Disks that are full, read-only or hang from some operation on."""

import errno
import io
import os
import shutil
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path

FULL, READ_ONLY, HANGS = errno.ENOSPC, errno.EROFS, "hangs"


class Disk:
    """Counts what is done to files below a directory, and lets that fail from one operation on.

    Those of Python that write a version are counted: make, open, write, rename, copy and remove. On a full
    disk one may rename and remove.

    Attributes:
        done: operations since `break_at`.
        failed: what those that failed were, by their names.
    """

    def __init__(self, patched, folder):
        self.folder, self.done, self.failed = folder, 0, []
        self._at, self._fault, self._healed = None, None, threading.Event()
        for owner, name, grows in (
            *((os, "mkdir", True), (os, "pwrite", True), (os, "rename", False), (os, "rmdir", False)),
            *(
                (os, "unlink", False),
                (shutil, "copyfile", True),
                (Path, "write_text", True),
                (io, "open", True),
            ),
        ):
            patched.setattr(owner, name, self._counted(getattr(owner, name), name, grows))

    def break_at(self, operation, fault):
        self.done, self.failed, self._at, self._fault = 0, [], operation, fault
        self._healed = threading.Event()

    def heal(self):
        self._at = None
        self._healed.set()

    def _counted(self, original, name, grows):
        def work(*args, **options):
            # of files that are read no byte is written
            is_read = name == "open" and not set("wa+") & set([*args, "r"][1])
            path = args[1] if name == "copyfile" else args[0]
            if not is_read and self._is_here(path, options):
                self._may_fail(name, grows, [] if name in ("pwrite", "write_text") else [str(path)])
            return original(*args, **options)

        return work

    def _is_here(self, path, options):
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        elif options.get("dir_fd") is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{options['dir_fd']}"), path)
        return os.fspath(path).startswith(f"{self.folder}/")

    def _may_fail(self, name, grows, path):
        if self._at is None:
            return
        self.done += 1
        if self.done <= self._at or (self._fault == FULL and not grows):
            return
        self.failed.append(name)
        if self._fault == HANGS:
            self._healed.wait(300)
        else:
            raise OSError(self._fault, os.strerror(self._fault), *path)


@contextmanager
def small_disk(folder, size):
    """A file system of so many bytes at a directory; yields whether this machine lets one have it."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = (
        shutil.which("mount") and not subprocess.run(command, capture_output=True, check=False).returncode
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
