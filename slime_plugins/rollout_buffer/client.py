"""How a program of its own writes to the service: as long as it takes, each trajectory once."""

import time
from typing import Any

import httpx
import orjson
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay

from slime.utils.http_utils import bearer_header

_PAUSE_S = 1.0


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
        tries = Retrying(
            retry=retry_if_exception(_may_pass),
            wait=_pause,
            stop=stop_after_delay(self._deadline_s),
            reraise=True,
        )
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


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in (429, 503)
    return isinstance(error, httpx.TransportError) and not isinstance(error, httpx.UnsupportedProtocol)


def _pause(state: RetryCallState) -> float:
    """What the service asks for, else a second."""
    error = state.outcome.exception() if state.outcome else None
    if isinstance(error, httpx.HTTPStatusError):
        asked = error.response.headers.get("Retry-After", "")
        return float(asked) if asked.isdecimal() else _PAUSE_S
    return _PAUSE_S
