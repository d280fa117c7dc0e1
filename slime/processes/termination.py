"""SIGTERM ends this process in time, whatever it is doing, and the last line says so.

    end_on_sigterm()              # from now on: at once
    with putting_away(6.0):       # in here: SystemExit, and 6 seconds for what follows from it
        ...
    if was_terminated():
        leave()
    end("error: the raylet is gone", status=1)    # the same for another reason

Python calls its handlers between two steps of the main thread, which may be in a call of Ray's for a minute.
So a thread waits for what the interpreter writes when a signal arrives (``signal.set_wakeup_fd``).
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

STATUS = 128 + signal.SIGTERM
LAST_LINE = "terminated by SIGTERM"

_told = threading.Event()
_leaving = threading.Lock()
_exit_timeout = 0.0  # seconds for the main thread to leave by itself
_raised = False
_outcome = LAST_LINE, STATUS


def end_on_sigterm() -> None:
    """Call it in the main thread; calling it again does nothing."""
    if is_ours():
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # A child that was forked and has not become another program yet has these files as well.
    os.register_at_fork(after_in_child=_forget)
    threading.Thread(target=_watch, args=(reader,), name="sigterm", daemon=True).start()
    signal.signal(signal.SIGTERM, _handle)


def is_ours() -> bool:
    """Whether SIGTERM ends this process in this way, and not in another one that has been set since."""
    return signal.getsignal(signal.SIGTERM) is _handle


@contextlib.contextmanager
def putting_away(seconds: float) -> Iterator[None]:
    """Within, SIGTERM raises SystemExit in the main thread, and ends the process so many seconds later."""
    global _exit_timeout
    _exit_timeout = seconds
    try:
        yield
    finally:
        _exit_timeout = 0.0


def was_terminated() -> bool:
    """Whether a SIGTERM has come: what fails from then on may fail because of it."""
    return _told.is_set()


def end(last_line: str, status: int) -> None:
    """Ends this process as a SIGTERM does, for a reason of its own; any thread may call it."""
    global _outcome
    if not was_terminated():
        _outcome = last_line, status
        os.kill(os.getpid(), signal.SIGTERM)


def leave() -> NoReturn:
    """Writes the last line and ends the process, whatever its other threads do."""
    _leaving.acquire()  # for good: who comes second waits for the end
    last_line, status = _outcome
    with contextlib.suppress(OSError):  # nobody reads it any more
        os.write(2, f"{last_line}\n".encode())
    os._exit(status)


def _handle(signum: int, frame: FrameType | None) -> None:
    global _raised
    _told.set()
    if _raised:  # a second one must not interrupt what the first one began
        return
    if not _exit_timeout:  # here too, or what the signal has interrupted goes on until the thread runs
        leave()
    _raised = True
    raise SystemExit(_outcome[1])


def _watch(reader: int) -> None:
    while os.read(reader, 1) != bytes([signal.SIGTERM]):
        pass
    _told.set()
    time.sleep(_exit_timeout)
    leave()


def _forget() -> None:
    if is_ours():
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
