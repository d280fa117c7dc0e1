import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.processes import reaper
from slime.processes.reaper import SHARED_MEMORY, living, read_processes, sweep

pytestmark = pytest.mark.slow

# The reaper, which also writes a line for each look at what runs below the driver.
TELLING = """
import sys

def tell(known):
    with open({looks!r}, "a") as file:
        file.write(" ".join(map(str, known)) + "\\n")

source = open({reaper!r}).read()
looked = "        seen |= known.keys()\\n"
assert looked in source
exec(compile(source.replace(looked, looked + "        tell(known)\\n"), {reaper!r}, "exec"))
"""
# A child that has forgotten where it comes from: no environment, a session of its own, its parent gone.
DRIVER = """
import subprocess, sys, time
from slime.processes import reaper
reaper.__file__ = sys.argv[1]
running = reaper.start_run_reaper()
sleeper = [sys.executable, "-c", "import time; time.sleep(1000)"]
code = f"import subprocess, sys; p = subprocess.Popen({sleeper}, start_new_session=True, env={{}}); " \\
    "print(p.pid, flush=True); sys.stdin.read()"
subprocess.run([sys.executable, "-c", code])
print("orphaned", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def looks(tmp_path):
    """A file with what the reaper has seen, a line for each look."""
    path = tmp_path / "looks"
    path.touch()
    (tmp_path / "telling.py").write_text(TELLING.format(looks=str(path), reaper=reaper.__file__))
    return path


@pytest.fixture
def driver(looks):
    command = [sys.executable, "-c", DRIVER, str(looks.with_name("telling.py"))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


def wait_until(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_nothing_outlives_a_killed_driver(driver, looks):
    sleeper = driver.stdout.readline().strip()
    wait_until(lambda: sleeper in looks.read_text().split())  # while its parent lives
    driver.stdin.close()
    assert driver.stdout.readline() == "orphaned\n"
    before = len(looks.read_text().splitlines())
    wait_until(lambda: len(looks.read_text().splitlines()) >= before + 2)
    sleeper = int(sleeper)
    left = {**living({}, driver.pid), sleeper: read_processes()[sleeper][1]}
    assert len(left) == 2  # the reaper and the orphan
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    wait_until(lambda: not living(left))


def test_shared_memory_of_a_killed_process_is_removed():
    code = (
        "import time, torch; from slime.utils.tensor_bucket import serialize_tensors; t = torch.ones(1000); "
        "serialize_tensors(t); print('there', flush=True); time.sleep(1000)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout.readline() == "there\n"
    files = {name for name in os.listdir(SHARED_MEMORY) if name.startswith(f"torch_{owner.pid}_")}
    assert files
    # Torch's manager removes its own in a while, if it lives. Of this one it does not know.
    unmanaged = f"torch_{owner.pid}_0_unmanaged"
    Path(SHARED_MEMORY, unmanaged).touch()
    sweep({owner.pid})
    assert files | {unmanaged} <= set(os.listdir(SHARED_MEMORY))  # it lives
    owner.kill()
    owner.wait()
    sweep({os.getpid()})
    assert unmanaged in os.listdir(SHARED_MEMORY)
    sweep({owner.pid})
    assert not (files | {unmanaged}) & set(os.listdir(SHARED_MEMORY))


def test_memory_that_a_process_shares_goes_with_it_and_with_its_children():
    """As in a cluster that a run joins, where nobody else looks after it, and Ray kills the children."""
    code = (
        "import os, time, torch; from slime.utils.tensor_bucket import FlattenedTensorBucket; "
        "from slime.weight_sync.transports.handle import serialize_bucket; "
        "serialize_bucket(FlattenedTensorBucket(named_tensors=[('a', torch.ones(1000))])); "
        "print('there', flush=True); time.sleep(1000)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout.readline() == "there\n"
    mine = lambda: [name for name in os.listdir(SHARED_MEMORY) if name.startswith(f"torch_{owner.pid}_")]
    assert mine()
    children = living({}, owner.pid)
    assert children  # torch's manager
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    owner.kill()
    wait_until(lambda: not mine())
    owner.wait()


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

    monkeypatch.setattr(reaper, "time", SimpleNamespace(sleep=pause, monotonic=lambda: sum(pauses)))
    reaper.reap(known)
    assert child.returncode == 0
    assert len(pauses) == 2 and sum(pauses) < reaper.GRACE_S


def test_what_does_not_end_by_itself_is_killed_after_the_grace(monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    known, pauses = living({child.pid: read_processes()[child.pid][1]}), []

    def pause(seconds: float) -> None:
        assert child.poll() is None or sum(pauses) >= reaper.GRACE_S
        pauses.append(seconds)

    monkeypatch.setattr(reaper, "time", SimpleNamespace(sleep=pause, monotonic=lambda: sum(pauses)))
    reaper.reap(known)
    assert child.wait() == -signal.SIGKILL and sum(pauses) >= reaper.GRACE_S
