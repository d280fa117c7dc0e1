"""SIGTERM ends a driver in time, wherever it is, with one last line and status 143."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HANGS = 120  # seconds
START = """
import ctypes, signal, sys, time
# As from a shell; of tests that a script runs in its background the child inherits that Ctrl-C is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from slime.processes.termination import end_on_sigterm, leave, putting_away, was_terminated

def hang():
    # As in a call of Ray's: no step of Python's, so that no handler runs.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    print("ready", flush=True)
    ctypes.CDLL(None).sleep(600)

def sleep():
    # In short calls: no call is interrupted by a signal that comes just before it.
    while True:
        time.sleep(0.05)

end_on_sigterm()
end_on_sigterm()
"""


@contextmanager
def driver(code: str) -> Iterator["subprocess.Popen[str]"]:
    """One that has said that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", START + code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()


def terminate(process: "subprocess.Popen[str]", times: int = 1) -> str:
    """What it writes until it has ended with status 143."""
    for _ in range(times):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 143, err
    return out + err


@pytest.mark.parametrize("signals", [1, 3])
def test_a_main_thread_that_runs_no_handler_is_ended(signals: int) -> None:
    with driver("hang()") as process:
        assert terminate(process, signals) == "terminated by SIGTERM\n"


def test_another_reason_ends_it_the_same_way() -> None:
    code = """
import threading
from slime.processes.termination import end
threading.Timer(0.1, end, ["error: nobody is left", 7]).start()
hang()
"""
    with driver(code) as process:
        out, err = process.communicate(timeout=HANGS)
    assert (process.returncode, out + err) == (7, "error: nobody is left\n")


def test_the_first_reason_is_told() -> None:
    code = """
from slime.processes.termination import end
with putting_away(600.0):
    try:
        print("ready", flush=True)
        sleep()
    finally:
        end("error: another", 7)
        leave()
"""
    with driver(code) as process:
        assert terminate(process) == "terminated by SIGTERM\n"


def test_what_is_put_away_is_put_away_though_the_signal_comes_again() -> None:
    code = """
with putting_away(600.0):
    try:
        print("ready", flush=True)
        sleep()
    finally:
        time.sleep(1)
        print("put away", was_terminated(), flush=True)
        leave()
"""
    with driver(code) as process:
        assert terminate(process, 3) == "put away True\nterminated by SIGTERM\n"


def test_putting_away_has_an_end() -> None:
    code = """
with putting_away(0.5):
    try:
        print("ready", flush=True)
        sleep()
    finally:
        hang()
"""
    with driver(code) as process:
        assert terminate(process) == "ready\nterminated by SIGTERM\n"


def test_ctrl_c_and_other_signals_are_as_they_were() -> None:
    code = """
signal.signal(signal.SIGUSR1, lambda *_: None)
signal.raise_signal(signal.SIGUSR1)
try:
    print("ready", flush=True)
    sleep()
except KeyboardInterrupt:
    print("interrupted", was_terminated(), flush=True)
"""
    with driver(code) as process:
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=HANGS)
        assert (out, process.returncode) == ("interrupted False\n", 0)


def test_a_forked_child_dies_of_it_alone() -> None:
    code = """
import os
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.write(writer, b"x")
    time.sleep(600)
os.read(reader, 1)
os.kill(child, signal.SIGTERM)
print(os.waitpid(child, 0)[1], was_terminated())
print("ready", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", START + code], cwd=ROOT, capture_output=True, timeout=HANGS)
    assert done.stdout == f"{int(signal.SIGTERM)} False\nready\n".encode()
