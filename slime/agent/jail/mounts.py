"""The file system of a jail: read-only programs, and two places to write that live in memory."""

import os
from collections.abc import Iterable
from pathlib import Path

from slime.agent.jail import kernel

WORKSPACE = "/workspace"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SETTINGS = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_MAX_FILES = 65_536


def build_root(root: str, readable: Iterable[str], disk_bytes: int, processes_shown: bool) -> None:
    """Make a root of one's own and go there. Needs a mount namespace, and a process namespace for /proc.

    Args:
        root: an empty folder, where it is mounted.
        readable: absolute paths to show, read-only, besides the system's programs.
        disk_bytes: that the two writable places hold, each.
        processes_shown: whether there is a /proc, of this jail's processes.
    """
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID, "mode=0755,size=1m")
    # First, since what is shown may lie in one of them.
    for place in (WORKSPACE, "/tmp"):
        os.makedirs(root + place, exist_ok=True)
        options = f"mode=1777,size={disk_bytes},nr_inodes={_MAX_FILES}"
        kernel.mount("tmpfs", root + place, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    for path in (*_SYSTEM, *_SETTINGS, *_outermost(readable)):
        _show(root, path)
    _make_devices(root)
    os.symlink("/tmp", root + "/dev/shm")
    Path(root, "etc/passwd").write_text(f"agent:x:1000:1000::{WORKSPACE}:/bin/sh\n")
    Path(root, "etc/group").write_text("agent:x:1000:\n")
    if processes_shown:
        os.makedirs(root + "/proc", exist_ok=True)
        flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        kernel.mount("proc", root + "/proc", "proc", flags)
    flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID
    kernel.mount("none", root, flags=flags)
    kernel.make_root(root)


def _outermost(paths: Iterable[str]) -> list[str]:
    """Paths that no other one, nor a folder of the system, holds already."""
    kept: list[str] = []
    for path in sorted(os.path.normpath(path) for path in paths):
        if not any(path == other or path.startswith(other + "/") for other in (*_SYSTEM, *kept)):
            kept.append(path)
    return kept


def _show(root: str, path: str) -> None:
    """A link as a link, a folder or file as a read-only view of it."""
    if not os.path.lexists(path):
        return
    os.makedirs(os.path.dirname(root + path), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), root + path)
        return
    if os.path.isdir(path):
        os.makedirs(root + path, exist_ok=True)
    else:
        Path(root + path).touch()
    kernel.mount(path, root + path, flags=kernel.MS_BIND | kernel.MS_REC)
    kernel.make_read_only(root + path)


def _make_devices(root: str) -> None:
    os.makedirs(root + "/dev", exist_ok=True)
    os.makedirs(root + "/etc", exist_ok=True)
    for name in _DEVICES:
        Path(root, "dev", name).touch()
        kernel.mount(f"/dev/{name}", f"{root}/dev/{name}", flags=kernel.MS_BIND)
