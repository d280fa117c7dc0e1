"""How a program of its own writes to the service: as long as it takes, each trajectory once."""

import time
from collections.abc import Callable
from typing import Any

import httpx
import orjson
from tenacity import RetryCallState, Retrying

from slime.utils.http_utils import bearer_header

_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 16.0


class BufferClient:
    """Waits while the service is full, or away; any thread may use it.

    Args:
        url: of the service.
        deadline_s: of one call, all tries together.
    """

    def __init__(self, url: str, api_key: str | None = None, deadline_s: float = 3600.0) -> None:
        self._url, self._deadline_s = url.rstrip("/"), deadline_s
        headers = {"Content-Type": "application/json", **bearer_header(api_key)}
        self._client = httpx.Client(trust_env=False, headers=headers)

    def write(self, item: dict[str, Any]) -> bool:
        """Whether it is new; it is on the service's disk then.

        Raises:
            httpx.HTTPStatusError: it is refused, or the service was full until the deadline.
            httpx.TransportError: the service was away until the deadline.
        """
        return not self._post("/buffer/write", item)["message"]

    def acknowledge(self, leases: list[str]) -> None:
        """Keeps for good what was fetched under these leases; raises as `write`."""
        self._post("/buffer/acknowledge", {"leases": leases})

    def fetch(self, **asked: Any) -> list[dict[str, Any]]:
        """Items of complete groups, the fields as of `trajectory.Fetch`; raises as `write`."""
        answer = self._post("/get_rollout_data", asked)
        return answer["data"]["data"] if answer["success"] else []

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        tries = retrying(lambda error: self._deadline_s if is_busy(error) or is_away(error) else 0.0)
        return tries(self._try, path, orjson.dumps(body), time.monotonic() + self._deadline_s)

    def _try(self, path: str, body: bytes, deadline: float) -> dict[str, Any]:
        left = max(deadline - time.monotonic(), _PAUSE_S)
        answer = self._client.post(f"{self._url}{path}", content=body, timeout=left)
        if answer.is_error:
            raise httpx.HTTPStatusError(
                f"POST {self._url}{path}: HTTP {answer.status_code}: {answer.text[:2000]}",
                request=answer.request,
                response=answer,
            )
        return orjson.loads(answer.content)


def is_busy(error: BaseException) -> bool:
    """Whether a server that is there wants to be asked later: it is full, or has nobody for it yet."""
    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (429, 503)


def is_away(error: BaseException) -> bool:
    """Whether there was no answer."""
    return isinstance(error, httpx.TransportError) and not isinstance(error, httpx.UnsupportedProtocol)


def retrying(seconds_of: Callable[[BaseException], float]) -> Retrying:
    """Calls again after longer and longer pauses, and raises what the last call did.

    Args:
        seconds_of: for how many seconds from the first call on an error may come again.
    """

    def may_pass(state: RetryCallState) -> bool:
        error = state.outcome.exception() if state.outcome else None
        return error is not None and (state.seconds_since_start or 0.0) < seconds_of(error)

    return Retrying(retry=may_pass, wait=_pause, reraise=True)


def _pause(state: RetryCallState) -> float:
    """What the server asks for, else a second, and twice as much each time."""
    error = state.outcome.exception() if state.outcome else None
    asked = error.response.headers.get("Retry-After", "") if isinstance(error, httpx.HTTPStatusError) else ""
    first = float(asked) if asked.isdecimal() else _PAUSE_S
    return max(first, min(first * 2.0 ** (state.attempt_number - 1), _LONGEST_PAUSE_S))
