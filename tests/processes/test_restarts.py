"""A command that fails is started again as long as it gets on; one that is told to end is not."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Counts its starts, says what it has got to, and ends as the line of its number says.
_COMMAND = """
import os, signal, sys, time
place = sys.argv[1]
with open(place + "/starts", "a") as file:
    file.write(f"{os.getpid()}\\n")
number = len(open(place + "/starts").readlines())
ends = sys.argv[2].split(",")
end = ends[min(number, len(ends)) - 1]
if end.endswith("+"):
    open(place + "/progress", "w").write(str(number))
end = end.strip("+")
if end == "hang":
    signal.signal(signal.SIGTERM, lambda *got: os._exit(143))
    open(place + "/hangs", "w").close()
    while True:  # in short calls: none is interrupted by a signal that comes just before it
        time.sleep(0.05)
if end == "stop":
    os.kill(os.getpid(), signal.SIGSTOP)
if end == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(end))
"""
_SUPERVISOR = """
import os, sys
from pathlib import Path
from slime.processes.restarts import Restarts
place, ends, limit, pause = sys.argv[2:]
command = [sys.executable, "-S", "-c", sys.argv[1], place, ends]
progress = lambda: (Path(place) / "progress").exists() and (Path(place) / "progress").read_text()
sys.exit(Restarts(command, os.environ, progress, int(limit), float(pause), stopped_limit_s=0.1).run())
"""


@pytest.fixture
def supervisor(tmp_path):
    """``supervisor(ends)``: a process that supervises a command with these ends."""
    started = []

    def start(ends, limit=2, pause=0.01):
        words = [sys.executable, "-c", _SUPERVISOR, _COMMAND, tmp_path, ends, limit, pause]
        started.append(
            subprocess.Popen(
                list(map(str, words)), cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def starts(place):
    return [int(line) for line in (place / "starts").read_text().split()]


@pytest.mark.parametrize(
    ("ends", "status", "count"),
    [
        ("0", 0, 1),
        ("1,0", 0, 2),
        ("kill,0", 0, 2),
        ("2", 2, 1),  # flags that cannot be used
        ("1,2,0", 0, 3),  # which may also be a port that the first start has not let go of
        ("130", 130, 1),  # interrupted by someone else
        ("143", 143, 1),
        ("1", 1, 3),
        ("kill", 137, 3),
        ("stop,0", 0, 2),
        ("1,1,1+,1,0", 0, 5),  # got on, so that failures are counted anew
        ("1+,1,1,1", 1, 3),
    ],
)
def test_a_command_is_started_again_while_it_gets_on(supervisor, tmp_path, ends, status, count):
    process = supervisor(ends)
    said = process.communicate(timeout=120)[1].splitlines()
    assert process.returncode == status
    assert len(starts(tmp_path)) == count
    gave_up = bool(said) and said[-1].startswith("error: ")
    assert gave_up == (status in (1, 137))
    stopped = [line for line in said if "is stopped (SIGSTOP), for 0.1 s now: it is killed" in line]
    assert len(stopped) == ends.count("stop")
    assert len(said) - gave_up - len(stopped) == count - 1


def test_what_it_says(supervisor, tmp_path):
    said = supervisor("kill,7,7", limit=1).communicate(timeout=120)[1].splitlines()
    assert said == [
        "supervisor: the run was killed by SIGKILL: it starts again in 0.01 s (1 of 1)",
        "error: the run ended with exit status 7, 2 times in a row without a new checkpoint",
    ]


def wait_for(path):
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


def test_a_pause_doubles_and_a_signal_ends_it(supervisor, tmp_path):
    process = supervisor("1", limit=5, pause=60)
    assert "starts again in 60 s (1 of 5)" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 143 and len(starts(tmp_path)) == 1


def test_sigterm_is_handed_on_and_ends_it(supervisor, tmp_path):
    process = supervisor("hang")
    wait_for(tmp_path / "hangs")
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=120)[1] == ""
    assert process.returncode == 143 and len(starts(tmp_path)) == 1


def test_what_it_started_ends_with_it(supervisor, tmp_path):
    process = supervisor("hang")
    wait_for(tmp_path / "hangs")
    (pid,) = starts(tmp_path)
    process.kill()
    process.communicate(timeout=120)
    deadline = time.monotonic() + 120
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
