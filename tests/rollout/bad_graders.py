"""Graders that go wrong on some answers, each in its own way; on others they are right."""

import os
import signal
import subprocess
import sys
import time

HERE = "tests.rollout.bad_graders.misbehave"


def misbehave(response: str, label: str) -> float:
    """Only the response says what happens: a grader does not know beforehand either."""
    if response in _MISDEEDS:
        _MISDEEDS[response]()
    return float(response == label)


def _loop() -> None:
    while True:
        pass


def _loop_without_alarm() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    _loop()


def _allocate() -> None:
    bytearray(10 << 30)


def _fork_and_stay() -> None:
    if os.fork() == 0:
        time.sleep(600)


def _fork_and_return() -> None:
    os.fork()


def _daemonise() -> None:
    if os.fork() == 0:
        os.setsid()
        subprocess.Popen(["sleep", "600"])
        os._exit(0)
    os.wait()


def _print() -> None:
    print('{"value": 1.0}', flush=True)
    subprocess.run(["echo", '{"value": 1.0}'], check=True)


def _raise() -> None:
    raise ZeroDivisionError("by zero")


_MISDEEDS = {
    "loop": _loop,
    "loop without alarm": _loop_without_alarm,
    "allocate": _allocate,
    "exit": lambda: os._exit(0),
    "sys.exit": lambda: sys.exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "fork and stay": _fork_and_stay,
    "fork and return": _fork_and_return,
    "daemonise": _daemonise,
    "raise": _raise,
    "print": _print,
    "close": lambda: os.closerange(3, 64),
}
