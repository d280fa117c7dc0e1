"""Landlock (Linux 5.13): an unprivileged process gives up writing outside of a few places, for good.

All that it starts has given it up too. From the interface's version 6 on (Linux 6.12) a process can also give
up sending signals to any that has not given up as much.
"""

import ctypes
import os
from collections.abc import Iterable

from slime.agent.jail import kernel

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_SCOPE_SIGNAL = 1 << 1
_FIRST_WITH_SCOPES = 6
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_CHANGE_FOLDERS = sum(1 << bit for bit in range(4, 13))
"""Removing and making entries of all kinds."""
_RENAME_ACROSS = 1 << 13
_SINCE = {_RENAME_ACROSS: 2, _TRUNCATE: 3}


class _Ruleset(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("files", "network", "scoped")]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def version() -> int:
    """Returns the version of the kernel's Landlock interface; 0 without one."""
    try:
        return kernel.system_call(_CREATE_RULESET, "landlock", None, 0, _VERSION_FLAG)
    except OSError:
        return 0


def write_only_below(folders: Iterable[str], files: Iterable[str]) -> None:
    """Give up writing, making and removing files elsewhere.

    Raises:
        OSError: the kernel has no Landlock, or does not let this process use it.
    """
    known = version()
    if not known:
        raise OSError("landlock: not in this kernel")
    on_files = _WRITE_FILE | (_TRUNCATE if known >= _SINCE[_TRUNCATE] else 0)
    everything = on_files | _CHANGE_FOLDERS | (_RENAME_ACROSS if known >= _SINCE[_RENAME_ACROSS] else 0)
    rules = [(folder, everything) for folder in folders] + [(file, on_files) for file in files]
    ruleset = _ruleset(_Ruleset(files=everything))
    try:
        for path, allowed in rules:
            _allow(ruleset, path, allowed)
        kernel.system_call(_RESTRICT_SELF, "landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)


def signal_only_own() -> None:
    """Give up sending signals to processes that are not this one's descendants; older kernels cannot."""
    if version() < _FIRST_WITH_SCOPES:
        return
    ruleset = _ruleset(_Ruleset(scoped=_SCOPE_SIGNAL))
    try:
        kernel.system_call(_RESTRICT_SELF, "landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)


def _ruleset(attributes: _Ruleset) -> int:
    size = ctypes.sizeof(attributes) if version() >= _FIRST_WITH_SCOPES else 8
    return kernel.system_call(_CREATE_RULESET, "landlock", ctypes.byref(attributes), size, 0)


def _allow(ruleset: int, path: str, allowed: int) -> None:
    if not os.path.exists(path):
        return
    parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = ctypes.byref(_PathBeneath(allowed, parent))
        kernel.system_call(_ADD_RULE, f"landlock {path}", ruleset, _PATH_BENEATH, rule, 0)
    finally:
        os.close(parent)
