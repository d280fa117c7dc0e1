"""Ranks of tests leave no process behind, however they end."""

import os
import signal
import subprocess
import time

import pytest

from slime.processes.reaper import living, read_processes
from tests.megatron_harness import run_ranks


def _leave_a_child(rank, directory, end):
    # As multiprocessing's manager does, it outlives its parent.
    child = subprocess.Popen(["sleep", "100"])
    # Its start tells it from a later process of the same number.
    (directory / f"{rank}.partial").write_text(f"{child.pid} {read_processes()[child.pid][1]}")
    (directory / f"{rank}.partial").rename(directory / f"{rank}")
    if end == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    while end == "raises" and rank == 1:
        time.sleep(1)  # is killed because of the other
    while not (directory / "1").exists():
        time.sleep(0.01)
    if end == "raises":
        raise ValueError("on purpose")


@pytest.mark.parametrize(("end", "message"), [("returns", None), ("raises", "on purpose"), ("dies", "died")])
def test_what_a_rank_started_ends_with_it(tmp_path, end, message):
    if message is None:
        assert run_ranks(_leave_a_child, 2, tmp_path, end) == [None, None]
    else:
        with pytest.raises(RuntimeError, match=message):
            run_ranks(_leave_a_child, 2, tmp_path, end)
    notes = [path.read_text().split() for path in tmp_path.glob("[01]")]
    assert notes
    known = {int(pid): int(start) for pid, start in notes}
    deadline = time.monotonic() + 60
    while living(known):
        assert time.monotonic() < deadline
        time.sleep(0.02)
