"""A driver ends by name once a process of Ray's own can do nothing for it any more."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HANGS = 120  # seconds
# Two stand for Ray's; the main thread is in a call that never returns, and runs no handler.
DRIVER = """
import ctypes, os, signal, subprocess, sys
from slime.processes.termination import end_on_sigterm
from slime.ray.ray_watch import ray_watch

end_on_sigterm()
names = ("raylet", "gcs_server")
quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
processes = {name: subprocess.Popen(["sleep", "600"], **quiet) for name in names}
with ray_watch({name: process.pid for name, process in processes.items()}, 0.05, float(sys.argv[1])):
    print(*(process.pid for process in processes.values()), flush=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    ctypes.CDLL(None).sleep(int(sys.argv[2]))
for process in processes.values():
    process.kill()
    process.wait()
print("left", flush=True)
"""


@contextmanager
def driver(limit: float, seconds: int) -> Iterator["tuple[subprocess.Popen[str], dict[str, int]]"]:
    """One that is in a call for so long, and its Ray's process ids."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(limit), str(seconds)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    pids = dict(zip(("raylet", "gcs_server"), map(int, process.stdout.readline().split()), strict=True))
    try:
        yield process, pids
    finally:
        process.kill()
        process.wait()
        for pid in pids.values():
            _send(pid, signal.SIGKILL)


def _send(pid: int, signum: int) -> None:
    subprocess.run(["kill", f"-{signum}", str(pid)], stderr=subprocess.DEVNULL, check=False)


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
@pytest.mark.parametrize(
    ("signum", "told"),
    [(signal.SIGKILL, "has ended"), (signal.SIGSTOP, r"is stopped \(SIGSTOP\), for \d+ s now")],
)
def test_it_ends_with_the_name_of_what_is_gone_or_stopped(name: str, signum: int, told: str) -> None:
    with driver(0.3, 600) as (process, pids):
        _send(pids[name], signum)
        _, error = process.communicate(timeout=HANGS)
    assert process.returncode == 1
    (line,) = error.splitlines()
    whole = rf"error: Ray's {name} \(process {pids[name]}\) {told} \(Ray cannot go on without it\)"
    assert re.fullmatch(whole, line), error


def test_a_short_stop_is_forgiven_and_what_ends_after_it_says_nothing() -> None:
    with driver(600.0, 2) as (process, pids):
        _send(pids["raylet"], signal.SIGSTOP)
        out, error = process.communicate(timeout=HANGS)
    assert (process.returncode, out, error) == (0, "left\n", "")


def test_a_sigterm_to_all_of_a_run_is_told_as_that() -> None:
    with driver(600.0, 600) as (process, pids):
        _send(pids["raylet"], signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=HANGS)
    assert (process.returncode, error) == (143, "terminated by SIGTERM\n")
