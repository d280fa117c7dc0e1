"""The asynchronous HTTP client of the rollout code. Ports and addresses can be imported from here as well.

init_http_client(args)
output = await post(f"{router_url}/generate", {"input_ids": [1, 2], "sampling_params": {}})
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import httpx
import orjson

from slime.utils.addresses import find_available_port as find_available_port
from slime.utils.addresses import get_host_info as get_host_info
from slime.utils.addresses import http_url as http_url
from slime.utils.addresses import is_loopback as is_loopback
from slime.utils.addresses import is_port_available as is_port_available
from slime.utils.addresses import wrap_ipv6 as wrap_ipv6
from slime.utils.deadly_requests import refuse_deadly
from slime.utils.http_client import Answer, send, stream_lines
from slime.utils.weight_clock import clock

T = TypeVar("T")

RETRY_PAUSE_S = 1.0
ERROR_BODY_CHARACTERS = 2000
_GENERATING = ("/generate", "/v1/completions", "/v1/chat/completions")
_BY_THE_BASE = (
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
    "/api/generate",
    "/invocations",
    "/vertex_generate",
)
_EVENT, _LAST_EVENT = b"data:", b"[DONE]"


class HttpStatusError(RuntimeError):
    """A server answered with a status of 400 or more.

    Attributes:
        url: what was asked.
        status: the HTTP status code.
        body: the start of the answer.
    """

    def __init__(self, method: str, url: str, status: int, body: str) -> None:
        super().__init__(method, url, status, body)
        self.method = method
        self.url = url
        self.status = status
        self.body = body

    def __str__(self) -> str:
        return f"{self.method} {self.url}: HTTP {self.status}: {self.body}"

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later: server errors and "too many requests"."""
        return self.status >= 500 or self.status == 429


class UnnamedAdapter(ValueError):
    """A request that engines with adapters are to answer does not say with which, or cannot."""


class BrokenAnswer(httpx.RemoteProtocolError):
    """An answer that had begun did not come to its end."""


@dataclass
class _ClientSettings:
    """What requests of this process carry.

    Attributes:
        headers: sent to ``origins`` alone; user code posts to judges and sandboxes with the same client.
        origins: of the run's own servers, as ``http://host:port``.
        vocab_sizes: of the models behind some of them.
        adapters: those that the run's own engines have. They compute with the only one, or with that of
            the sample that is worked on, what does not say otherwise.
    """

    headers: dict[str, str] = field(default_factory=dict)
    origins: set[str] = field(default_factory=set)
    vocab_sizes: dict[str, int] = field(default_factory=dict)
    adapters: Sequence[str] = ()


_settings = _ClientSettings()
_adapter: ContextVar[str | None] = ContextVar("adapter", default=None)


@contextmanager
def asking_adapter(name: str | None) -> Iterator[None]:
    """Requests to generate that are made within, by tasks that start there too, are for this adapter."""
    token = _adapter.set(name)
    try:
        yield
    finally:
        _adapter.reset(token)


def asked_adapter() -> str | None:
    """The adapter that requests are for which are made here, if one was named."""
    return _adapter.get()


class EngineGpus(Protocol):
    """The part of ``args`` that gives the GPUs of all engines, and of one."""

    @property
    def rollout_num_gpus(self) -> int: ...

    @property
    def rollout_num_gpus_per_engine(self) -> int: ...


def get_rollout_num_engines(args: EngineGpus) -> int:
    """Engines that answer the prompts, at least 1; by the rollout GPUs where ``args`` do not say."""
    known = getattr(args, "rollout_num_engines", None)
    return known or max(1, args.rollout_num_gpus // args.rollout_num_gpus_per_engine)


def init_http_client(args: Any, api_key: str | None = None, adapters: Sequence[str] = ()) -> None:
    """Sets the routers' key, which requests to them carry from now on.

    Args:
        adapters: names of those that engines have beside the base. Requests to generate carry one too,
            unless they have a ``lora_path``; null there asks the base.
    """
    global _settings
    headers = bearer_header(api_key or getattr(args, "sglang_api_key", None))
    routers = dict(getattr(args, "sglang_model_routers", None) or {})
    host, port = getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)
    routers["default"] = (host, port)
    size = getattr(args, "vocab_size", None)
    vocab_sizes = {http_url(host, port): size} if host and port and size else {}
    origins = {http_url(host, port) for host, port in routers.values() if host and port}
    _settings = _ClientSettings(headers, origins, vocab_sizes, tuple(adapters))


def share_key_with(url: str) -> None:
    """Requests to this server, one of the run's own, carry the run's key from now on."""
    _settings.origins.add(_origin(url))


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def bearer_header(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


async def post(
    url: str,
    payload: Mapping[str, Any] | None,
    max_retries: int = 60,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """POSTs JSON and returns the decoded answer: parsed JSON, else text.

    Connection errors, 5xx and 429 are retried ``max_retries`` times with pauses of a second; other 4xx
    never, since the same bad request would be refused again. An answer may take arbitrarily long.

    Raises:
        HttpStatusError: the last answer was an error.
        httpx.TransportError: the server could not be reached; the message names the URL.
        DeadlyRequest: SGLang would end with it, so that one of the run's own servers does not get it.
        UnnamedAdapter: one of several adapters is to answer, and nothing says which; or none can.
    """
    return await _request("POST", url, payload, max_retries, headers)


async def get(url: str, max_retries: int = 60, headers: Mapping[str, str] | None = None) -> Any:
    """GETs and returns the decoded answer; retries and errors as in :func:`post`."""
    return await _request("GET", url, None, max_retries, headers)


async def stream(
    url: str,
    payload: Mapping[str, Any],
    max_retries: int = 60,
    headers: Mapping[str, str] | None = None,
) -> AsyncGenerator[Any, None]:
    """POSTs JSON and yields the parsed ``data:`` of each server-sent event of the answer, up to ``[DONE]``.

    Retried as in :func:`post` until the answer begins, and not after that. Who leaves early should do so
    under ``contextlib.aclosing``: the connection is closed then, which ends the server's work on it.

    Raises:
        HttpStatusError, DeadlyRequest: as for :func:`post`.
        BrokenAnswer: the connection broke after the answer had begun, perhaps before its first event, or
            within one.
        httpx.TransportError: the server could not be reached. Both name the URL.
    """
    all_headers = _headers_for(url, headers)
    lines = await _retried(max_retries, lambda: _begun(url, _encoded(url, payload), all_headers))
    async with aclosing(lines):
        async for line in _named_if_broken(lines):
            if isinstance(line, bytes) and line.startswith(_EVENT):
                data = line.removeprefix(_EVENT).strip()
                if data == _LAST_EVENT:
                    return
                yield _parsed(url, data)


def _parsed(url: str, event: bytes) -> Any:
    """
    Raises:
        BrokenAnswer: there is no whole JSON in it: without a length the end of an answer is none of HTTP's.
    """
    try:
        return orjson.loads(event)
    except orjson.JSONDecodeError as error:
        raise BrokenAnswer(f"POST {url}: an event that is no JSON: {event[:200]!r}") from error


async def _named_if_broken(lines: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    try:
        async for line in lines:
            yield line
    except httpx.TransportError as error:
        raise BrokenAnswer(str(error)) from error


async def _begun(
    url: str, content: bytes | None, headers: Mapping[str, str]
) -> AsyncGenerator[bytes | Answer, None]:
    """The lines of an answer that has begun, and is none of an error."""
    lines = stream_lines("POST", url, content, headers)
    first = await anext(lines)
    if isinstance(first, Answer):
        await lines.aclose()
        _check_status("POST", url, first)
    return lines


async def _request(
    method: str,
    url: str,
    payload: Mapping[str, Any] | None,
    max_retries: int,
    headers: Mapping[str, str] | None,
) -> Any:
    all_headers = _headers_for(url, headers)
    return await _retried(max_retries, lambda: _try_request(method, url, _encoded(url, payload), all_headers))


async def _try_request(method: str, url: str, content: bytes | None, headers: Mapping[str, str]) -> Any:
    answer = await send(method, url, content, headers)
    _check_status(method, url, answer)
    if answer.content_type.startswith("application/json"):
        return orjson.loads(answer.body)
    return answer.body.decode(errors="replace")


async def _retried(max_retries: int, attempt: Callable[[], Awaitable[T]]) -> T:
    """The result of the first attempt that succeeds, or the last one's error."""
    for left in range(max_retries, -1, -1):
        try:
            return await attempt()
        except (HttpStatusError, httpx.TransportError) as error:
            if not left or not _is_retryable(error):
                raise
        await asyncio.sleep(RETRY_PAUSE_S)
    raise AssertionError("unreachable: the last error was raised")


def _encoded(url: str, payload: Mapping[str, Any] | None) -> bytes | None:
    if payload is None:
        return None
    origin, path = _origin(url), urlsplit(url).path
    if origin in _settings.origins:
        if path == "/generate":
            refuse_deadly(payload, _settings.vocab_sizes.get(origin))
        if _settings.adapters and path in _BY_THE_BASE and payload.get("lora_path", "") is not None:
            raise UnnamedAdapter(
                f"{url}: SGLang answers it with the base, whatever adapter is asked for (wanted: one of "
                f"{', '.join(_GENERATING)}, or a lora_path that is null)"
            )
        if _settings.adapters and path in _GENERATING and "lora_path" not in payload:
            payload = {"lora_path": _adapter_here(url), **payload}
        if path in _GENERATING:
            payload = clock.keyed(payload)
    return orjson.dumps(payload)


def _adapter_here(url: str) -> str:
    if (name := asked_adapter()) is not None:
        return name
    if len(_settings.adapters) == 1:
        return _settings.adapters[0]
    raise UnnamedAdapter(
        f"{url}: the request names none of the adapters {', '.join(_settings.adapters)} and is made outside "
        "of the task that a sample was given to (wanted: lora_path, null for the base)"
    )


def _headers_for(url: str, headers: Mapping[str, str] | None) -> dict[str, str]:
    own_headers = _settings.headers if _origin(url) in _settings.origins else {}
    return {"Content-Type": "application/json", **own_headers, **(headers or {})}


def _is_retryable(error: BaseException) -> bool:
    if isinstance(error, HttpStatusError):
        return error.retryable
    return isinstance(error, httpx.TransportError) and not isinstance(error, httpx.UnsupportedProtocol)


def _check_status(method: str, url: str, answer: Answer) -> None:
    if answer.status >= 400:
        body = answer.body.decode(errors="replace")[:ERROR_BODY_CHARACTERS]
        raise HttpStatusError(method, url, answer.status, body)
