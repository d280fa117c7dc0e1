"""Pytest in a copy of this checkout, forked from a process that has imported what no checkout changes."""

import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from slime.processes.supervisor import (  # noqa: E402
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    descendants,
    prctl,
)

_OURS = {path.stem for path in ROOT.iterdir()}
"""Top-level modules and packages of a checkout, and the names of its other files."""


_PRELOADED = (
    *("torch", "torch.distributed", "transformers.modeling_utils", "transformers.models.auto.modeling_auto"),
    *("ray", "hypothesis", "fastapi", "uvicorn", "httpx", "aiohttp", "omegaconf", "math_verify", "pyarrow"),
)


def preload() -> None:
    """Imports what most tests need and no change touches; importing it takes longer than most of them."""
    os.environ["OMP_NUM_THREADS"] = "1"  # as in a run; torch reads it when it is imported
    for name in _PRELOADED:
        importlib.import_module(name)


def copy_tree(target: Path) -> None:
    """Copies what git tracks or would, as it is in the working tree."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def run_pytest(arguments: Sequence[str], tree: Path, log: Path, limit: float) -> int | None:
    """Pytest's status; None if it was not done after ``limit`` seconds.

    Whatever the tests have started has ended on return. This process becomes the parent of what they orphan.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    sys.stdout.flush()
    pytest_pid = os.fork()
    if not pytest_pid:
        _become_pytest(arguments, tree, log)
    status, deadline = None, time.monotonic() + limit
    while status is None and time.monotonic() < deadline:
        time.sleep(0.05)
        status = _reap().get(pytest_pid)
    while pids := descendants():
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
        _reap()
    return status


def _reap() -> dict[int, int]:
    """Collects children that have ended, orphans included: their exit codes by process id."""
    ended = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if not pid:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def _become_pytest(arguments: Sequence[str], tree: Path, log: Path) -> NoReturn:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    os.chdir(tree)
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    for standard in (1, 2):
        os.dup2(file, standard)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # they may be captured
    # In front of everything, or this checkout would be imported by its installed name.
    os.environ |= {"PYTHONPATH": str(tree), "COLUMNS": "300"}
    # A change of the same length within a second would be taken for what was compiled before it.
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    sys.path[:] = [
        str(tree),
        *(path for path in sys.path if path and Path(path) not in (ROOT, ROOT / "benchmarks")),
    ]
    for name in [*sys.modules]:
        if name.partition(".")[0] in _OURS:
            del sys.modules[name]
    # Processes of multiprocessing would import this script again, and with it this checkout.
    sys.modules["__main__"] = ModuleType("__main__")
    importlib.invalidate_caches()
    try:
        status = int(pytest.main([*arguments]))
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        status = int(pytest.ExitCode.INTERNAL_ERROR)
    sys.stdout.flush()
    os._exit(status)
