"""Processes that carry a mark in their environment: how to find what somebody's child has left behind.

A daemon leaves its parent, its session and its process group, but not its environment. One that is given a
new environment by ``execve`` is not found.
"""

import contextlib

import psutil

_MAX_SWEEPS = 50


def kill_marked(name: str, value: str) -> None:
    """Kill whatever has this variable in its environment, until a look finds nothing that does."""
    for _ in range(_MAX_SWEEPS):
        found = [process for process in psutil.process_iter() if _is_marked(process, name, value)]
        if not found:
            return
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()


def _is_marked(process: psutil.Process, name: str, value: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(name) == value
    except (psutil.Error, OSError):
        return False
