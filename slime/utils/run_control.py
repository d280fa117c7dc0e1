"""A run that goes on, asked by way of the file in its directory that says where and with which key.

control = RunControl(Path("outputs/run/engines.json"), "outputs/run", timeout=90.0)
control.ask("GET", "/engines")["engines"]
"""

import http.client
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slime.config.engines import CONTROL_FILE

_LOOPBACK = "127.0.0.1"
_LONGEST = 2**25  # bytes of an answer


class Refused(RuntimeError):
    """The run does not do what it was asked, or there is none."""


def control_file(places: Iterable[Path]) -> Path | None:
    """The file in the first of these directories that has one."""
    return next((place / CONTROL_FILE for place in places if (place / CONTROL_FILE).exists()), None)


class RunControl:
    """Asks one run. What goes wrong is told without the key.

    Args:
        place: by which messages call it.
        timeout: seconds for an answer.

    Raises:
        Refused: the file is not one of a run.
    """

    def __init__(self, file: Path, place: str, timeout: float) -> None:
        self._place, self._timeout = place, timeout
        try:
            told = json.loads(file.read_text())
            self._url, self._key = urlsplit(told["url"]), str(told["key"])
            where = (self._url.scheme, self._url.hostname, bool(self._url.port))
        except OSError as error:
            raise Refused(f"{place}: cannot be asked: {error.strerror}: {error.filename}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Refused(f"{place}: {CONTROL_FILE} is not one of a run: {error}") from error
        if where != ("http", _LOOPBACK, True):  # anybody may have written it
            raise Refused(f"{place}: {CONTROL_FILE} is not one of a run: its url is not on {_LOOPBACK}")

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """
        Raises:
            Refused: with what the run says, or because it does not answer.
        """
        connection = http.client.HTTPConnection(_LOOPBACK, self._url.port, timeout=self._timeout)
        content = None if body is None else json.dumps(body)
        try:
            connection.request(method, path, content, {"Authorization": f"Bearer {self._key}"})
            response = connection.getresponse()
            answer = json.loads(response.read(_LONGEST))
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            raise Refused(
                f"{self._place}: the run does not answer at {self._url.geturl()}: {error} (wanted: one that "
                "goes on, on this machine)"
            ) from error
        finally:
            connection.close()
        if not isinstance(answer, dict):
            raise Refused(f"{self._place}: what answers at port {self._url.port} is no run")
        if response.status != 200:
            raise Refused(str(answer.get("error", f"HTTP {response.status}")))
        return answer
