"""A process is killed, stopped for good, or stopped for a moment."""

import subprocess
import sys
import time

import pytest

from slime.chaos.faults import Kind, strike
from slime.processes.stopped import is_running, is_stopped

_PAUSES = """
import os, sys
from slime.chaos.faults import Kind, strike
assert strike(Kind.PAUSE, int(sys.argv[1]), {Kind.PAUSE: 600.0})
print(flush=True)
os.kill(os.getpid(), 9)
"""
_SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


@pytest.fixture
def victim():
    with subprocess.Popen(_SLEEPS) as process:
        yield process
        process.kill()


def _until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_killed_process_dies(victim):
    assert strike(Kind.KILL, victim.pid)
    assert victim.wait(60) == -9
    assert not strike(Kind.KILL, victim.pid)


def test_a_process_that_is_told_to_end_may_do_so_itself(victim):
    assert strike(Kind.TERM, victim.pid)
    assert victim.wait(60) == -15
    assert not strike(Kind.TERM, victim.pid)


def test_a_stopped_process_stays_stopped_and_a_paused_one_goes_on(victim):
    assert strike(Kind.STOP, victim.pid)
    _until(lambda: is_stopped(victim.pid))
    time.sleep(0.4)
    assert is_stopped(victim.pid)
    assert strike(Kind.PAUSE, victim.pid, {Kind.PAUSE: 0.2})
    _until(lambda: not is_stopped(victim.pid))
    assert is_running(victim.pid)


def test_a_paused_process_goes_on_though_who_has_paused_it_was_killed(victim):
    """As with ``slime chaos`` itself: it would leave a process behind that never ends."""
    with subprocess.Popen(
        [sys.executable, "-c", _PAUSES, str(victim.pid)], stdout=subprocess.PIPE
    ) as striker:
        assert striker.stdout.readline()
        assert striker.wait(60) == -9
    _until(lambda: not is_stopped(victim.pid))
    assert is_running(victim.pid)


def test_nobody_is_paused_who_has_ended(victim):
    victim.kill()
    victim.wait(60)
    assert not strike(Kind.PAUSE, victim.pid)
