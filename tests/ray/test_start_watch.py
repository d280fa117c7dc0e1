"""A start of Ray that hangs ends by the name of what hangs, in seconds, and leaves nothing."""

import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HANGS = 300  # seconds
TAG = "SLIME_TEST_START"
# One stands for Ray's; the main thread is in a call that never returns.
DRIVER = """
import ctypes, os, subprocess, sys
from slime.processes.reaper import start_run_reaper
from slime.processes.termination import end_on_sigterm
from slime.ray import local_start

end_on_sigterm()
reaper = start_run_reaper()
local_start.STOPPED_LIMIT_S, local_start._GRACE = 0.5, 1.0

def init():
    process = subprocess.Popen([os.environ["SERVER"], "600"])
    print(process.pid, flush=True)
    if sys.argv[1] == "stops":
        os.kill(process.pid, 19)
    ctypes.CDLL(None).sleep(600)

local_start.start_ray(float(sys.argv[2]), init)
"""
# And with a real one, whose GCS is stopped as soon as it is there, or once its port is known.
REAL = """
import glob, os, sys, threading, time
from ray._private import services
from slime.processes.reaper import start_run_reaper
from slime.processes.termination import end_on_sigterm
from slime.ray import local_start

end_on_sigterm()
reaper = start_run_reaper()
start_gcs = services.start_gcs_server

def stop(pid, at):
    while at == "port" and not glob.glob(f"/tmp/ray/session_*_{os.getpid()}/gcs_server_port_*"):
        time.sleep(0.005)
    os.kill(pid, 19)
    print(pid, flush=True)

def start_and_stop(*words, **options):
    started = start_gcs(*words, **options)
    stopping = threading.Thread(target=stop, args=(started.process.pid, sys.argv[1]), daemon=True)
    stopping.start()
    stopping.join(None if sys.argv[1] == "start" else 0)
    return started

services.start_gcs_server = start_and_stop
local_start.start_ray(120.0, lambda: local_start.ray.init(address="local", include_dashboard=False))
"""


def end_of(code: str, *words: str, **variables: str) -> tuple[str, str]:
    """What is written until a driver has ended with status 1, and nothing is left of it."""
    tag = uuid.uuid4().hex
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    process = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=ROOT,
        env={**env, **variables, TAG: tag},
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert process.returncode == 1, process.stderr
    deadline = time.monotonic() + HANGS
    while carrying(tag):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process.stdout.strip(), process.stderr.strip().splitlines()[-1]


def carrying(tag: str) -> list[str]:
    """The processes with this tag in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{TAG}={tag}".encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


@pytest.fixture
def server(tmp_path: Path) -> str:
    path = tmp_path / "gcs_server"
    path.symlink_to("/bin/sleep")
    return str(path)


def test_a_process_of_ray_that_is_stopped_while_it_starts_is_named(server: str) -> None:
    pid, line = end_of(DRIVER, "stops", "600", SERVER=server)
    told = rf"gcs_server \(process {pid}\) is stopped \(SIGSTOP\), for \d+ s now"
    assert re.fullmatch(rf"error: Ray does not start on this machine: {told}", line), line


def test_a_start_that_hangs_says_which_processes_there_are(server: str) -> None:
    pid, line = end_of(DRIVER, "hangs", "0.5", SERVER=server)
    there = f"its gcs_server runs (process {pid}), its raylet does not run"
    assert line == f"error: Ray has not started on this machine after 1.5 s: {there}"


def test_a_sigterm_while_ray_starts_is_not_taken_by_ray() -> None:
    code = """
import os
from ray._private import utils
from slime.processes.termination import end_on_sigterm
from slime.ray import local_start

def init():
    utils.set_sigterm_handler(lambda *_: os._exit(15))
    os.kill(os.getpid(), 15)

end_on_sigterm()
local_start.start_ray(60.0, init)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HANGS
    )
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (143, "terminated by SIGTERM"), ended


@pytest.mark.cluster
@pytest.mark.parametrize("at", ["start", "port"])
def test_a_gcs_that_is_stopped_while_ray_starts_ends_the_run_in_seconds(at: str) -> None:
    pid, line = end_of(REAL, at)
    assert line.startswith(
        f"error: Ray does not start on this machine: gcs_server (process {pid}) is stopped"
    )
