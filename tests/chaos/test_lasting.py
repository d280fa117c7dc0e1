"""A fault that lasts is undone: after its time, and when who struck is killed."""

import os
import resource
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from slime.chaos import connections
from slime.chaos.faults import LASTS_S, Kind, strike
from slime.chaos.lasting import SPARE_DESCRIPTORS, SPARE_MEMORY, limited, paused, slowed
from slime.processes.stopped import is_running, is_stopped

ROOT = Path(__file__).parents[2]
LIMITS = {Kind.DESCRIPTORS: resource.RLIMIT_NOFILE, Kind.MEMORY: resource.RLIMIT_AS}
# What it starts when it is told to has its limits.
_TRIES = """
import os, subprocess, sys
print("ready", flush=True)
files = []
for line in sys.stdin:
    try:
        if line == "open\\n":
            while True:
                files.append(os.open("/dev/null", os.O_RDONLY))
        elif line == "map\\n":
            bytearray(1 << 26)
        elif line == "start\\n":
            print(subprocess.Popen(["sleep", "600"], close_fds=False).pid, flush=True)
            continue
        print("done", flush=True)
    except (OSError, MemoryError) as error:
        print(len(files), type(error).__name__, flush=True)
"""
assert SPARE_MEMORY < 1 << 26  # what it tries to map
_STRIKES = """
import os, sys
from slime.chaos.faults import Kind, strike
assert strike(Kind(sys.argv[1]), int(sys.argv[2]), {Kind(sys.argv[1]): 600.0})
print("struck", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), 9)
"""
# In a name space of its own, where the shared memory is another.
_FILLS = """
import os, subprocess, sys, time
from slime.chaos.faults import Kind, strike
from slime.chaos.lasting import SPARE_SHARED_MEMORY
place, size = "/dev/shm", 16 << 20
if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", place]).returncode:
    sys.exit(77)
def left():
    system = os.statvfs(place)
    return system.f_bavail * system.f_frsize
assert left() == size
run = subprocess.Popen(["sleep", "600"])
try:
    assert strike(Kind.SHM, run.pid, {Kind.SHM: 600.0})
    assert left() == SPARE_SHARED_MEMORY and os.listdir(place) == []
    try:
        with open(f"{place}/mine", "wb") as file:
            file.write(bytes(2 * SPARE_SHARED_MEMORY))
        sys.exit("it was not full")
    except OSError as error:
        assert error.errno == 28, error
    os.unlink(f"{place}/mine")
finally:
    run.kill()  # it is over for the run that was disturbed, which would hold this one's pipes
    run.wait()
deadline = time.monotonic() + 60
while left() < size:
    assert time.monotonic() < deadline
    time.sleep(0.01)
"""


@pytest.fixture
def victim():
    command = [sys.executable, "-S", "-c", _TRIES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def _ask(victim, word):
    print(word, file=victim.stdin, flush=True)
    return victim.stdout.readline().strip()


def _until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _by_somebody_else(kind, pid):
    """Who has struck, and waits for a line to be killed."""
    command = [sys.executable, "-c", _STRIKES, kind, str(pid)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout.readline() == "struck\n"
    return process


def _kill(striker):
    striker.communicate("now\n", timeout=60)
    assert striker.returncode == -9


def test_a_slow_process_is_stopped_by_turns_and_goes_on_for_good_when_who_slows_it_was_killed(victim):
    striker = _by_somebody_else(Kind.SLOW, victim.pid)
    for _ in range(2):
        _until(lambda: is_stopped(victim.pid))
        _until(lambda: not is_stopped(victim.pid))
    _until(lambda: is_stopped(victim.pid))
    _kill(striker)
    deadline = time.monotonic() + 60
    since = time.monotonic()
    while time.monotonic() - since < 1:  # two cycles without a stop
        assert time.monotonic() < deadline
        since = time.monotonic() if is_stopped(victim.pid) else since
        time.sleep(0.01)
    assert is_running(victim.pid)


@pytest.mark.parametrize("fault", [slowed, paused])
def test_who_is_stopped_when_it_is_over_goes_on(fault, victim):
    with fault(victim.pid, os.pidfd_open(victim.pid)) as tick:
        tick(0)
        _until(lambda: is_stopped(victim.pid))
    _until(lambda: not is_stopped(victim.pid))
    assert _ask(victim, "map") == "done"


def test_few_descriptors_are_left_until_it_is_over(victim):
    before = resource.prlimit(victim.pid, resource.RLIMIT_NOFILE)
    striker = _by_somebody_else(Kind.DESCRIPTORS, victim.pid)
    assert _ask(victim, "open") == f"{SPARE_DESCRIPTORS} OSError"
    _kill(striker)
    _until(lambda: resource.prlimit(victim.pid, resource.RLIMIT_NOFILE) == before)


def test_little_memory_is_left_until_it_is_over(victim):
    assert _ask(victim, "map") == "done"
    striker = _by_somebody_else(Kind.MEMORY, victim.pid)
    assert _ask(victim, "map") == "0 MemoryError"
    _kill(striker)
    _until(lambda: _ask(victim, "map") == "done")


@pytest.mark.parametrize("kind", LIMITS)
def test_a_limit_is_over_after_its_time(kind, victim):
    before = resource.prlimit(victim.pid, LIMITS[kind])
    assert strike(kind, victim.pid, {kind: 0.2})
    _until(lambda: resource.prlimit(victim.pid, LIMITS[kind]) == before)


@pytest.mark.parametrize("what", LIMITS.values())
def test_who_was_started_under_a_limit_gets_rid_of_it_though_who_started_it_has_died(what, victim):
    """A raylet starts workers, which may outlive it."""
    before = resource.prlimit(victim.pid, what)
    with ExitStack() as ends, ExitStack() as fault:
        most = 1 << 30 if what == resource.RLIMIT_AS else 64
        tick = fault.enter_context(limited(victim.pid, what, lambda pid: most))
        started = int(_ask(victim, "start"))
        ends.callback(os.kill, started, 9)  # it would hold the pipes of this one
        assert resource.prlimit(started, what) == resource.prlimit(victim.pid, what) != before
        tick(0)
        victim.kill()
        victim.wait(60)
        fault.close()
        assert resource.prlimit(started, what) == before


def test_shared_memory_is_full_until_the_run_is_over():
    unshared = ["unshare", "--mount", "--map-root-user"]
    done = subprocess.run([*unshared, sys.executable, "-c", _FILLS], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip(f"no name space of its own: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


def test_connections_are_cut_and_others_may_be_made(monkeypatch):
    """A server goes on listening: those that it has lost come back."""
    if why := connections.refusal():
        pytest.skip(why)
    serves = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)\n"
    )
    serves += "while True: c = s.accept()[0]; c.sendall(b'x'); c.recv(1)"
    with subprocess.Popen([sys.executable, "-S", "-c", serves], stdout=subprocess.PIPE) as server:
        place = "127.0.0.1", int(server.stdout.readline())
        assert not strike(Kind.CUT, server.pid)  # it has none yet
        for _ in range(2):
            with socket.create_connection(place, timeout=60) as client:
                assert client.recv(1) == b"x"
                assert strike(Kind.CUT, server.pid)
                assert client.recv(1) == b""
        server.kill()
    assert not strike(Kind.CUT, server.pid)


@pytest.mark.parametrize("kind", [kind for kind in LASTS_S if kind is not Kind.SHM])
def test_nothing_is_done_to_who_has_ended(kind, victim):
    victim.kill()
    victim.wait(60)
    assert not strike(kind, victim.pid)


def test_what_fails_for_another_reason_is_told(victim):
    with pytest.raises(RuntimeError, match=r"slow of process \d+ ended with exit status 1"):
        strike(Kind.SLOW, victim.pid, {Kind.SLOW: "soon"})
