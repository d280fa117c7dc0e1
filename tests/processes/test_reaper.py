import os
import signal
import subprocess
import sys
import time
from argparse import Namespace

import pytest

from slime.processes import reaper
from slime.processes.reaper import POLL_S, SHARED_MEMORY, living, read_processes, sweep

# A child that has forgotten where it comes from: no environment, a session of its own, its parent gone.
DRIVER = """
import subprocess, sys, time
from slime.processes.reaper import start_run_reaper
reaper = start_run_reaper()
sleeper = [sys.executable, "-c", "import time; time.sleep(100)"]
code = f"import subprocess, time; p = subprocess.Popen({sleeper}, start_new_session=True, env={{}}); " \\
    "print(p.pid, flush=True); time.sleep(2.5)"
subprocess.run([sys.executable, "-c", code])
print("orphaned", flush=True)
time.sleep(100)
"""


@pytest.fixture
def driver():
    process = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


def test_nothing_outlives_a_killed_driver(driver):
    sleeper = int(driver.stdout.readline())
    assert driver.stdout.readline() == "orphaned\n"
    time.sleep(2 * POLL_S)
    left = {**living({}, driver.pid), sleeper: read_processes()[sleeper][1]}
    assert len(left) == 2  # the reaper and the orphan
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    deadline = time.monotonic() + 90
    while living(left):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_shared_memory_of_a_killed_process_is_removed():
    code = (
        "import time, torch; from slime.utils.tensor_bucket import serialize_tensors; t = torch.ones(1000); "
        "serialize_tensors(t); print('there', flush=True); time.sleep(100)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout.readline() == "there\n"
    files = [name for name in os.listdir(SHARED_MEMORY) if name.startswith(f"torch_{owner.pid}_")]
    assert files
    sweep({owner.pid})
    assert set(files) <= set(os.listdir(SHARED_MEMORY))  # it lives
    owner.kill()
    owner.wait()
    assert set(files) <= set(os.listdir(SHARED_MEMORY))  # nobody else removes them
    sweep({owner.pid})
    assert not set(files) & set(os.listdir(SHARED_MEMORY))


def test_a_later_process_with_a_known_id_is_not_the_known_one():
    start = read_processes()[os.getppid()][1]
    assert os.getppid() in living({os.getppid(): start}) or os.getppid() == 1
    assert living({os.getppid(): start + 1}) == {}


def test_what_ends_by_itself_is_not_killed_and_the_grace_ends_with_it(monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True)
    known, pauses = living({child.pid: read_processes()[child.pid][1]}), []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            child.communicate("go on\n")

    monkeypatch.setattr(reaper, "time", Namespace(sleep=pause, monotonic=lambda: sum(pauses)))
    reaper.reap(known)
    assert child.returncode == 0
    assert len(pauses) == 2 and sum(pauses) < reaper.GRACE_S


def test_what_does_not_end_by_itself_is_killed_after_the_grace(monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    known, pauses = living({child.pid: read_processes()[child.pid][1]}), []

    def pause(seconds: float) -> None:
        assert child.poll() is None or sum(pauses) >= reaper.GRACE_S
        pauses.append(seconds)

    monkeypatch.setattr(reaper, "time", Namespace(sleep=pause, monotonic=lambda: sum(pauses)))
    reaper.reap(known)
    assert child.wait() == -signal.SIGKILL and sum(pauses) >= reaper.GRACE_S
