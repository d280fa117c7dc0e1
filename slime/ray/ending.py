"""How a run ends: what its last line says, and that it does not wait for ever to say it."""

import os
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_ROOM = 2**20  # bytes


class CannotStart(RuntimeError):
    """The machines are not what the run needs; the message says all, and where it was found helps nobody."""


def cause(error: BaseException) -> str:
    """What went wrong, as one line: the first line of the innermost error of Ray's wrappings."""
    while isinstance(inner := getattr(error, "cause", None), BaseException):
        error = inner
    text = str(error).strip()
    if not text:
        return type(error).__name__
    headline = text.splitlines()[0]
    return headline if isinstance(error, RuntimeError | OSError) else f"{type(error).__name__}: {headline}"


def full_disks(paths: Iterable[str | None]) -> str:
    """Which of these places are on a disk without room, to be said behind a cause that may not name it.

    Libraries fail on a full disk in words of their own, as of a short write.
    """
    full = [path for path in paths if path and shutil.disk_usage(_existing(path)).free < _NO_ROOM]
    return f" (no space is left on the disk of {', '.join(full)})" if full else ""


def _existing(path: str) -> Path:
    here = Path(path).absolute()
    return next(place for place in (here, *here.parents) if place.exists())


def exit_status(error: BaseException | None) -> int:
    """Returns the exit status of a run that ended with this error."""
    match error:
        case None:
            return 0
        case KeyboardInterrupt():
            return 130
        case SystemExit():
            return error.code if isinstance(error.code, int) else int(error.code is not None)
        case _:
            return 1


@contextmanager
def leaving_within(seconds: float, what: str) -> Iterator[None]:
    """Ends this process if the body takes longer: Ray's calls have no deadline where raylet or GCS hangs.

    The run's reaper then kills what is left. The last line is the failure that led here, or ``what``.
    """
    failure = sys.exception()

    def leave() -> None:
        message = f"{what}: not done after {seconds:g} s"
        if isinstance(failure, Exception):
            print(message, file=sys.stderr)
            message = cause(failure)
        print(f"error: {message}", file=sys.stderr, flush=True)
        os._exit(exit_status(failure) or 1)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
