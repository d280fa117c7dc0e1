"""The last that a run knew of its engines, in its directory: for whoever looks when it is over.

One small file, written anew every few seconds. While the rollout side does not answer it stays as it is,
and says of when it is.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from slime.processes.private import write_private
from slime.ray.engine_rows import EngineRow

logger = logging.getLogger(__name__)

EVERY_S = 10.0
_TIMEOUT_S = 5.0  # for the rollout side, and for each engine
_LAST_S = 1.0  # the same when the run ends
Look = Callable[[float], Sequence[EngineRow]]


@contextmanager
def recording(path: Path, look: Look) -> Iterator[None]:
    """Writes what there is to the file during the block, and once more at its end.

    Args:
        look: finds the rows, within about as many seconds.
    """
    over = threading.Event()
    thread = threading.Thread(target=_record, args=(path, look, over), name="engine-record", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_LAST_S)
        if not thread.is_alive():
            _note(path, look, _LAST_S)


def _record(path: Path, look: Look, over: threading.Event) -> None:
    _note(path, look, _TIMEOUT_S)
    while not over.wait(EVERY_S):
        _note(path, look, _TIMEOUT_S)


def _note(path: Path, look: Look, timeout: float) -> None:
    try:
        rows = look(timeout)
    except Exception as error:  # the rollout side is lost, or starts again just now: the run's own affair
        logger.debug("no rows of engines: %s", error)
        return
    try:
        told = {"time": time.time(), "engines": [asdict(row) for row in rows]}
        write_private(path, json.dumps(told) + "\n")
    except OSError as error:  # the run does not depend on it
        logger.debug("%s: %s", path, error)
