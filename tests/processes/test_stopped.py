"""For how long a process has been stopped, as far as anybody has seen."""

import os
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest

from slime.processes import stopped
from slime.processes.stopped import StopClock


@pytest.fixture
def overdue(monkeypatch):
    """``overdue(seconds, pids, runs)``: what the clock says of a look at that time, after so many runs."""
    clock = StopClock()

    def look(seconds, pids, runs=0):
        monkeypatch.setattr(stopped, "_times_scheduled", lambda pid: runs)
        monkeypatch.setattr(stopped, "time", SimpleNamespace(monotonic=lambda: 1000.0 + seconds))
        return clock.overdue(pids)

    return look


def test_a_process_that_is_stopped_at_every_look_is_overdue(overdue):
    assert [overdue(seconds, [7]) for seconds in (0, 2, 5)] == [{}, {}, {}]
    assert overdue(7, [7, 8]) == {7: 7.0}


def test_a_process_that_ran_at_one_look_is_not(overdue):
    assert [overdue(seconds, pids) for seconds, pids in ((0, [7]), (3, []), (4, [7]), (9, [7]))] == [{}] * 4


def test_a_process_that_ran_between_two_looks_is_not(overdue):
    """Slowed by stops, it happens to be stopped at every look."""
    looks = [overdue(seconds, [7], runs) for seconds, runs in ((0, 10), (3, 10), (6, 11), (9, 12), (14, 12))]
    assert looks == [{}] * 5
    assert overdue(15, [7], 12) == {7: 6.0}


def test_a_process_that_goes_on_for_a_moment_is_seen_to_have_run():
    process, counts = subprocess.Popen(["sleep", "600"]), []
    try:
        for _ in range(3):
            process.send_signal(signal.SIGSTOP)
            await_state(process.pid, b"T")
            counts += [stopped._times_scheduled(process.pid) for _ in range(2)]
            process.send_signal(signal.SIGCONT)
            await_state(process.pid, b"S")
    finally:
        process.kill()
        process.wait()
    assert counts[0] == counts[1] < counts[2] == counts[3] < counts[4] == counts[5]
    assert stopped._times_scheduled(process.pid) == 0


def await_state(pid, letter):
    deadline = time.monotonic() + 120
    while stopped._state(pid) != letter:
        assert time.monotonic() < deadline, f"process {pid} is in state {stopped._state(pid)}"
        time.sleep(0.005)


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
