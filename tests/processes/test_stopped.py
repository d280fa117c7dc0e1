"""For how long a process has been stopped, as far as anybody has seen."""

import os
import signal
import subprocess
from types import SimpleNamespace

import pytest

from slime.processes import stopped
from slime.processes.stopped import StopClock


@pytest.fixture
def overdue(monkeypatch):
    """``overdue(seconds, pids)``: what the clock says of a look at that time."""
    clock = StopClock()

    def look(seconds, pids):
        monkeypatch.setattr(stopped, "time", SimpleNamespace(monotonic=lambda: 1000.0 + seconds))
        return clock.overdue(pids)

    return look


def test_a_process_that_is_stopped_at_every_look_is_overdue(overdue):
    assert [overdue(seconds, [7]) for seconds in (0, 2, 5)] == [{}, {}, {}]
    assert overdue(7, [7, 8]) == {7: 7.0}


def test_a_process_that_ran_at_one_look_is_not(overdue):
    assert [overdue(seconds, pids) for seconds, pids in ((0, [7]), (3, []), (4, [7]), (9, [7]))] == [{}] * 4


def test_nothing_is_held_against_it_for_the_time_in_which_nobody_looked(overdue):
    assert overdue(0, [7]) == overdue(600, [7]) == overdue(605, [7]) == {}
    assert overdue(606, [7]) == {7: 6.0}


def test_a_process_runs_until_it_is_dead_whoever_waits_for_it():
    process = subprocess.Popen(["sleep", "600"])
    assert stopped.is_running(process.pid)
    process.send_signal(signal.SIGSTOP)
    assert stopped.is_running(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not stopped.is_running(process.pid)  # a zombie
    process.wait()
    assert not stopped.is_running(process.pid)
