"""The engines of a run: as it tells them while it goes on, else as its directory has them last.

What is read may be anybody's: of each row only what is known here is handed on.
"""

import json
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.config.engines import LAST_ENGINES
from slime.utils.run_control import Refused, RunControl, control_file

_TIMEOUT_S = 5.0
_AGAIN_S = 30.0  # until a run that did not answer is asked again: each question takes its time there
_FRESH_S = 1.0  # in which another page is told the same
_LONGEST = 2**25  # bytes
_LONGEST_TEXT = 500  # characters
_TEXTS = ("model", "kind", "state", "url", "version", "health", "failure")
_NUMBERS = ("rank", "since", "failed", "running", "waiting", "tokens_per_second", "cache")


class Engines:
    """The engines of one run.

    Args:
        places: directories in which its files may be.
    """

    def __init__(self, places: Sequence[Path] = ()) -> None:
        self._places = places
        self._asking = threading.Lock()
        self._told: tuple[float, dict[str, Any]] = (-math.inf, {})
        self._silent_until = -math.inf

    def now(self) -> dict[str, Any]:
        """Returns the rows, and of when they are: ``time`` in Unix seconds, None where nothing is known.

        ``is_live`` says whether the run itself has told them, ``problem`` why it has not although it seems to
        go on, or why what it has left cannot be read.
        """
        with self._asking:
            at, told = self._told
            if time.monotonic() - at > _FRESH_S:
                told = self._found()
                self._told = time.monotonic(), told
            return told

    def _found(self) -> dict[str, Any]:
        problem = None
        if (file := control_file(self._places)) is not None and time.monotonic() >= self._silent_until:
            try:
                rows = _rows(RunControl(file, file.parent.name, _TIMEOUT_S).ask("GET", "/engines"))
                return {"is_live": True, "time": time.time(), "problem": None, "rows": rows}
            except (Refused, OSError, ValueError) as error:
                self._silent_until = time.monotonic() + _AGAIN_S
                problem = str(error)
        elif file is not None:
            problem = self._told[1].get("problem")
        found: dict[str, Any] = {"is_live": False, "time": None, "problem": problem, "rows": []}
        try:
            at, rows = self._recorded()
        except FileNotFoundError:
            return found
        except (OSError, ValueError, RecursionError) as error:
            return {**found, "problem": f"{LAST_ENGINES}: {error}"}
        return {**found, "time": at, "rows": rows}

    def _recorded(self) -> tuple[float | None, list[dict[str, Any]]]:
        """
        Raises:
            OSError, ValueError: it cannot be read, or is none.
        """
        files = [place / LAST_ENGINES for place in self._places]
        file = next((file for file in files if file.is_file()), None)
        if file is None:
            raise FileNotFoundError(LAST_ENGINES)
        with file.open("rb") as opened:
            told = json.loads(opened.read(_LONGEST))
        return _number(told.get("time") if isinstance(told, dict) else None), _rows(told)


def _rows(told: object) -> list[dict[str, Any]]:
    """
    Raises:
        ValueError: these are no rows of engines.
    """
    rows = told.get("engines") if isinstance(told, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("no rows of engines")
    return [
        {name: str(row.get(name, ""))[:_LONGEST_TEXT] for name in _TEXTS}
        | {name: _number(row.get(name)) for name in _NUMBERS}
        for row in rows
    ]


def _number(found: object) -> float | None:
    is_number = isinstance(found, int | float) and not isinstance(found, bool) and abs(found) < 1e15
    return found if is_number and math.isfinite(found) else None  # type: ignore[return-value, arg-type]
