"""A flag for signal handlers: set at any moment, and waited for without a lock."""

import os
import signal
import sys

from slime.processes.signal_flag import SignalFlag


def wait_with_a_signal_at(number: int | None, lines: list[int]) -> bool:
    """Python runs handlers between two instructions of the main thread: here before a line within `wait`."""
    flag = SignalFlag()

    def trace(frame, event, argument):
        if event == "line":
            lines.append(frame.f_lineno)
            if len(lines) == number:
                os.kill(os.getpid(), signal.SIGUSR1)
        return trace

    before = signal.signal(signal.SIGUSR1, lambda *_: flag.set())
    sys.settrace(trace)
    try:
        return flag.wait(0.0 if number is None else 60.0)
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_may_set_it_at_every_line_of_a_wait():
    lines: list[int] = []
    assert not wait_with_a_signal_at(None, lines)
    for number in range(1, len(lines)):  # the last one returns
        assert wait_with_a_signal_at(number, [])


def test_one_that_is_set_ends_every_wait_at_once():
    flag = SignalFlag()
    assert not flag.is_set() and not flag.wait(0.0)
    for _ in range(70_000):  # more than a pipe holds
        flag.set()
    assert flag.is_set() and flag.wait(60.0) and flag.wait(60.0)
