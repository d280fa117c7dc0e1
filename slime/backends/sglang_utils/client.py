"""A client of SGLang's control plane: one object per engine, synchronous.

    client = EngineClient(endpoint)
    client.pause_generation()
    client.flush_cache()
    with client.weight_update():
        client.update_weights_from_tensor([payload], weight_version="3")
    client.continue_generation()

Written against SGLang 0.5.23; what older servers lack is detected (404) and left out.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode

import httpcore
import orjson
from tenacity import RetryError, Retrying, retry_if_result, stop_after_delay, wait_exponential

from slime.utils.http_client import KEEPALIVE_S
from slime.utils.http_utils import bearer_header
from slime.utils.types import EngineEndpoint

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 600.0
FLUSH_TIMEOUT_S = 60.0
INFO_TIMEOUT_S = 60.0  # it needs no scheduler: an engine that is busy answers at once
_LEAST_TIMEOUT_S = 1.0
DEFAULT_GROUP = "weight_update_group"
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


class EngineClient:
    """Speaks to the engine at ``endpoint``. Picklable; may be used from several threads.

    ``timeout`` (seconds) bounds every single request. All methods raise :class:`EngineError`.
    ``commit_time`` adds up the seconds that weights took within the engine, where it tells them;
    ``has_update_session`` is false once `begin_weight_update` has found that the server has none;
    ``selector`` names the models of the engine that take weights: "all", "target" or "draft".
    """

    def __init__(self, endpoint: EngineEndpoint, timeout: float = REQUEST_TIMEOUT_S) -> None:
        self.endpoint = endpoint
        self.timeout = timeout
        self.commit_time = 0.0
        self.has_update_session = True
        self.selector = "all"
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

    def __repr__(self) -> str:
        return f"EngineClient({self.endpoint.url})"

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

    def serves(self, timeout: float = 5.0) -> bool:
        """Whether /health_generate answers 200 in time: it can generate now."""
        return self._status("/health_generate", timeout) == 200

    def health(self, timeout: float = 5.0) -> bool:
        """Whether it can generate, or is paused and its scheduler answers all the same, in time.

        Behind a pause SGLang's /health_generate fails after 20 s and /ready at once; what /server_info
        tells comes from the scheduler. The pause may begin while /health_generate is asked.
        """
        deadline = time.monotonic() + timeout
        left = lambda: max(deadline - time.monotonic(), _LEAST_TIMEOUT_S)
        ready = self._status("/ready", left())
        if ready is None:
            return False
        if ready != 503 and self.serves(left()):
            return True
        return self._status("/ready", left()) == 503 and self._status("/server_info", left()) == 200

    def _status(self, path: str, timeout: float) -> int | None:
        """Returns the status of the answer; None without one."""
        try:
            self.request("GET", path, timeout=timeout)
        except EngineError as error:
            return error.status
        return 200

    def model_info(self) -> dict[str, Any]:
        """What it serves, asked with a short deadline: whoever waits for several engines has one, too."""
        return self.request("GET", "/model_info", timeout=min(self.timeout, INFO_TIMEOUT_S))

    def weight_version(self) -> str:
        """The version of the weights being served; "default" before the first update."""
        found = self.model_info()
        if not isinstance(found, dict) or "weight_version" not in found:
            raise self._error("/model_info", 200, f"found {found!r:.200} (wanted: a weight_version)")
        return str(found["weight_version"])

    def server_info(self) -> dict[str, Any]:
        return self.request("GET", "/server_info")

    def loads(self) -> dict[str, Any]:
        return self.request("GET", "/v1/loads", params={"include": "core"})

    def abort(self, rid: str | None = None) -> None:
        """Aborts the request with this id and those whose ids begin so; all without one. Does not wait."""
        body = {"abort_all": True} if rid is None else {"rid": rid, "abort_all": False}
        self.request("POST", "/abort_request", body)

    def pause_generation(self, mode: str = "abort") -> None:
        """Returns when nothing is computed any more.

        Args:
            mode: what becomes of requests under way: "abort" ends them, "retract" gives up what was computed
                of them, "in_place" keeps it.
        """
        self.request("POST", "/pause_generation", {"mode": mode})

    def continue_generation(self) -> None:
        self.request("POST", "/continue_generation", {})

    def flush_cache(self, timeout: float = FLUSH_TIMEOUT_S) -> None:
        """Empties the KV cache; asks again for ``timeout`` seconds while the engine is still busy.

        Raises:
            EngineError: still busy then, or any other failure.
        """
        retrying = Retrying(
            stop=stop_after_delay(timeout),
            wait=wait_exponential(multiplier=0.02, max=1.0),
            retry=retry_if_result(lambda flushed: not flushed),
        )
        try:
            retrying(self.flush_idle_cache)
        except RetryError:
            raise self._error("/flush_cache", 400, f"still running or queued after {timeout:g} s") from None

    def flush_idle_cache(self) -> bool:
        """Empties the KV cache unless a request under way needs what it holds; whether it did."""
        try:
            self.request("GET", "/flush_cache")
        except EngineError as error:
            if error.status == 400:
                return False
            raise
        return True

    def _selected(self) -> dict[str, str]:
        return {} if self.selector == "all" else {"selector": self.selector}

    def begin_weight_update(self) -> None:
        """Opens an update session. Servers that have no sessions (404) are remembered."""
        if not self.has_update_session:
            return
        try:
            self.request("POST", "/begin_weight_update", self._selected())
        except EngineError as error:
            if error.status != 404:
                raise
            self.has_update_session = False

    def end_weight_update(self) -> None:
        if self.has_update_session:
            self.request("POST", "/end_weight_update", {})

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        """An update session around the body; it stays open if the body fails, as weights are then mixed."""
        self.begin_weight_update()
        yield
        self.end_weight_update()

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = DEFAULT_GROUP,
        backend: str = "nccl",
    ) -> None:
        """Joins a process group with the trainer, which is rank 0; returns when all have joined."""
        body = {"master_address": master_address, "master_port": master_port, "backend": backend}
        body |= {"rank_offset": rank_offset, "world_size": world_size, "group_name": group_name}
        self.request("POST", "/init_weights_update_group", body)

    def destroy_weights_update_group(self, group_name: str = DEFAULT_GROUP) -> None:
        """Leaves the group. An engine that does not know it, or is gone, is logged: the aim is reached."""
        # A short deadline: who gives no answer is found out by what is asked of it next.
        body, timeout = {"group_name": group_name}, min(self.timeout, INFO_TIMEOUT_S)
        try:
            self.request("POST", "/destroy_weights_update_group", body, timeout=timeout)
        except EngineError as error:
            if error.status not in (None, 400, 409):
                raise
            logger.warning("process group %s was not there to destroy: %s", group_name, error)

    def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[str],
        load_format: str | None = None,
        weight_version: str | None = None,
        flush_cache: bool = False,
    ) -> None:
        """Loads tensors handed over on this host; one base64 payload per TP rank."""
        body = {"serialized_named_tensors": list(serialized_named_tensors), "load_format": load_format}
        self.update("/update_weights_from_tensor", body, weight_version, flush_cache)

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str = DEFAULT_GROUP,
        load_format: str | None = None,
        weight_version: str | None = None,
        flush_cache: bool = False,
    ) -> None:
        """Receives tensors that the trainer broadcasts from rank 0 meanwhile; returns when they are loaded.

        ``dtypes`` may be written with or without "torch.".
        """
        body = {
            "names": list(names),
            "dtypes": [dtype.removeprefix("torch.") for dtype in dtypes],
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "load_format": load_format,
        }
        self.update("/update_weights_from_distributed", body, weight_version, flush_cache)

    def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None = None,
        weight_version: str | None = None,
        flush_cache: bool = False,
    ) -> None:
        """Loads an HF checkpoint; needs no session."""
        body = {"model_path": model_path, "load_format": load_format}
        self.update("/update_weights_from_disk", body, weight_version, flush_cache)

    def update(self, path: str, body: dict[str, Any], version: str | None, flush: bool = False) -> None:
        body = {**body, **self._selected(), "weight_version": version, "flush_cache": flush}
        answer = self.request("POST", path, body)
        if isinstance(answer, dict):
            took = answer.get("commit_time")
            self.commit_time += took if isinstance(took, float | int) else 0.0

    def update_weight_version(self, version: str) -> None:
        """Renames the version of the weights being served; running requests go on."""
        body = {"new_version": version, "abort_all_requests": False}
        self.request("POST", "/update_weight_version", body)

    def weights_checker(self, action: str) -> dict[str, Any]:
        """``action``: "checksum", "snapshot", "compare" or "reset_tensors"."""
        return self.request("POST", "/weights_checker", {"action": action, **self._selected()})

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Frees memory of an idle engine; ``tags`` out of weights, kv_cache, cuda_graph, None for all.

        The cache is flushed first: SGLang refuses to release it while prefixes are held.
        """
        self.flush_cache()
        self.request("POST", "/release_memory_occupation", {"tags": tags and list(tags)})

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        self.request("POST", "/resume_memory_occupation", {"tags": tags and list(tags)})


def _is_json(response: httpcore.Response) -> bool:
    kinds = (value for name, value in response.headers if name.lower() == b"content-type")
    return next(kinds, b"").startswith(b"application/json")


def _text(response: httpcore.Response) -> str:
    return response.content.decode(errors="replace")
