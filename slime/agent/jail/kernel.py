"""System calls that Python 3.11 has no function for. Errors are OSErrors that name the call."""

import ctypes
import os
import platform
from collections.abc import Collection
from typing import Any

NOBODY = 65534
"""The user and group that root becomes."""

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = 1, 2

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_PR_SET_CHILD_SUBREAPER = 36
_CAPABILITY_VERSION_3 = 0x20080522
_MAX_CAPABILITIES = 64
CAP_DAC_READ_SEARCH = 2
"""Allows to read what root could read; the others of root's rights are more than that."""
_MOUNT_SETATTR = 442
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def system_call(number: int, what: str, *arguments: Any) -> int:
    """One that the C library has no function for."""
    return _check(_libc.syscall(number, *arguments), what)


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    result = _libc.mount(
        source.encode(),
        target.encode(),
        kind.encode() or None,
        ctypes.c_ulong(flags),
        options.encode() or None,
    )
    _check(result, f"mount {target}")


def make_read_only(path: str) -> None:
    """The mount at a path and all below it (Linux 5.12)."""

    class Attributes(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]

    attributes = Attributes(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    arguments = (_AT_FDCWD, path.encode(), _AT_RECURSIVE, ctypes.byref(attributes), ctypes.sizeof(attributes))
    system_call(_MOUNT_SETATTR, f"mount_setattr {path}", *arguments)


def make_root(path: str) -> None:
    """The mount at a path becomes the root; nothing of the old one stays reachable."""
    os.chdir(path)
    number = _PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise OSError(f"pivot_root: not known on {platform.machine()}")
    system_call(number, "pivot_root", b".", b".")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/")


def unmount(path: str) -> None:
    _check(_libc.umount2(path.encode(), _MNT_DETACH), f"umount {path}")


def prctl(option: int, value: int = 0) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def die_with_parent(signal_number: int) -> None:
    prctl(_PR_SET_PDEATHSIG, signal_number)


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_dumpable(dumpable: bool) -> None:
    """Whether processes of the same user may trace this one and read its memory."""
    prctl(_PR_SET_DUMPABLE, int(dumpable))


def set_no_new_privileges() -> None:
    """Sets that no later execve gives more rights, as a setuid program would."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities(kept: Collection[int] = ()) -> None:
    """All but those kept (of the first 32), for this process and for those that it starts."""
    for capability in range(_MAX_CAPABILITIES):
        if capability in kept:
            continue
        try:
            prctl(_PR_CAPBSET_DROP, capability)
        except OSError:  # beyond the last one, or there is nothing left to drop with
            break
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    bits = sum(1 << capability for capability in kept)
    # Effective, permitted and inheritable ones below 32, then the same from there on.
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)(bits, bits)), "capset")
