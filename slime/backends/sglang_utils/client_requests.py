"""Requests to an engine, and what it answers."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import httpcore
import orjson

from slime.utils.http_client import KEEPALIVE_S
from slime.utils.http_utils import bearer_header
from slime.utils.types import EngineEndpoint

ERROR_BODY_CHARACTERS = 2000
_NO_ANSWER = (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError)


class EngineError(RuntimeError):
    """An engine could not be reached or refused a request.

    Attributes:
        url: the engine.
        endpoint: path of the request.
        status: HTTP status, None if there was no answer.
        body: the answer or the transport's error.
    """

    def __init__(self, url: str, endpoint: str, status: int | None, body: str) -> None:
        super().__init__(url, endpoint, status, body)
        self.url = url
        self.endpoint = endpoint
        self.status = status
        self.body = body

    def __str__(self) -> str:
        answer = "no answer" if self.status is None else f"HTTP {self.status}"
        return f"engine {self.url}: {self.endpoint}: {answer}: {self.body}"


class EngineRequests:
    """Asks the engine at ``endpoint``. Picklable; may be used from several threads.

    Args:
        timeout: seconds that bound every single request.
    """

    def __init__(self, endpoint: EngineEndpoint, timeout: float) -> None:
        self.endpoint = endpoint
        self.timeout = timeout
        headers = {"Content-Type": "application/json", **bearer_header(endpoint.api_key)}
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._http = self._new_http()

    def _new_http(self) -> httpcore.ConnectionPool:
        # What httpx adds to it takes as long again, and engines stand still meanwhile.
        return httpcore.ConnectionPool(max_connections=None, keepalive_expiry=KEEPALIVE_S)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_http"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._http = self._new_http()

    def close(self) -> None:
        self._http.close()

    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        params: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Sends one request and returns the parsed JSON of the answer, its text if that is not JSON.

        Raises:
            EngineError: no answer, a status of 400 or more, or ``success: false`` in the answer.
        """
        url = path if "://" in path else self.endpoint.url + path
        limit = self.timeout if timeout is None else timeout
        try:
            response = self._http.request(
                method,
                url if params is None else f"{url}?{urlencode(params)}",
                headers=self._headers,
                content=None if body is None else orjson.dumps(body),
                extensions={"timeout": dict.fromkeys(("connect", "read", "write", "pool"), limit)},
            )
        except _NO_ANSWER as error:
            raise self._error(path, None, f"{type(error).__name__}: {error}") from error
        if response.status >= 400:
            raise self._error(path, response.status, _text(response))
        answer = orjson.loads(response.content) if _is_json(response) else _text(response)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise self._error(path, response.status, str(answer.get("message", answer)))
        return answer

    def _error(self, path: str, status: int | None, body: str) -> EngineError:
        return EngineError(self.endpoint.url, path, status, body[:ERROR_BODY_CHARACTERS])

    def _status(self, path: str, timeout: float) -> int | None:
        """Returns the status of the answer; None without one."""
        try:
            self.request("GET", path, timeout=timeout)
        except EngineError as error:
            return error.status
        return 200


def _is_json(response: httpcore.Response) -> bool:
    kinds = (value for name, value in response.headers if name.lower() == b"content-type")
    return next(kinds, b"").startswith(b"application/json")


def _text(response: httpcore.Response) -> str:
    return response.content.decode(errors="replace")
