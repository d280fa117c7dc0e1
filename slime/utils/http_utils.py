"""Ports, addresses, and the asynchronous HTTP client of the rollout code.

init_http_client(args)
output = await post(f"{router_url}/generate", {"input_ids": [1, 2], "sampling_params": {}})
"""

import asyncio
import ipaddress
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import httpx
import orjson

T = TypeVar("T")

RETRY_PAUSE_S = 1.0
CONNECT_TIMEOUT_S = 30.0
CLIENTS_PER_LOOP = 32
KEEPALIVE_S = 2.0
"""Idle connections are dropped before uvicorn, after 5 s, drops them while a request is on its way."""
HIGHEST_PORT = 65535
ERROR_BODY_CHARACTERS = 2000
_EVENT, _LAST_EVENT = "data:", "[DONE]"


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


@dataclass
class _ClientSettings:
    """What every client of this process is made with; each event loop has clients of its own.

    Several per loop, used in turn, because httpx's connection pool looks at every connection for every
    request: 256 requests over one pool of 256 cost eight times the CPU of 32 small pools.

    Attributes:
        requests: how many are expected at a time.
        headers: sent to ``origins`` alone; user code posts to judges and sandboxes with the same client.
        origins: of the run's own servers, as ``http://host:port``.
    """

    requests: int = 512
    headers: dict[str, str] = field(default_factory=dict)
    origins: set[str] = field(default_factory=set)
    clients: WeakKeyDictionary[asyncio.AbstractEventLoop, Iterator[httpx.AsyncClient]] = field(
        default_factory=WeakKeyDictionary
    )


_settings = _ClientSettings()


class EngineGpus(Protocol):
    """Of ``args``: the GPUs of all engines, and of one."""

    @property
    def rollout_num_gpus(self) -> int: ...

    @property
    def rollout_num_gpus_per_engine(self) -> int: ...


def get_rollout_num_engines(args: EngineGpus) -> int:
    """Engines that answer the prompts, at least 1; by the rollout GPUs where ``args`` do not say."""
    known = getattr(args, "rollout_num_engines", None)
    return known or max(1, args.rollout_num_gpus // args.rollout_num_gpus_per_engine)


def init_http_client(args: Any, api_key: str | None = None) -> None:
    """Sets how many requests to expect, ``sglang_server_concurrency`` per engine, and the routers' key.

    Clients made earlier are dropped.
    """
    global _settings
    requests = args.sglang_server_concurrency * get_rollout_num_engines(args)
    headers = bearer_header(api_key or getattr(args, "sglang_api_key", None))
    routers = dict(getattr(args, "sglang_model_routers", None) or {})
    routers["default"] = (getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None))
    origins = {http_url(host, port) for host, port in routers.values() if host and port}
    _settings = _ClientSettings(requests, headers, origins)


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
        HttpStatusError: as for :func:`post`.
        httpx.TransportError: the server could not be reached, or the connection broke; it names the URL.
    """
    content, all_headers = _encoded(payload), _headers_for(url, headers)
    response = await _retried(max_retries, lambda: _open_stream(url, content, all_headers))
    try:
        async for line in response.aiter_lines():
            if not line.startswith(_EVENT):
                continue
            data = line.removeprefix(_EVENT).strip()
            if data == _LAST_EVENT:
                return
            yield orjson.loads(data)
    except httpx.TransportError as error:
        raise _named("POST", url, error) from error
    finally:
        await response.aclose()


async def _open_stream(url: str, content: bytes | None, headers: Mapping[str, str]) -> httpx.Response:
    client = _client()
    try:
        request = client.build_request("POST", url, content=content, headers=headers)
        response = await client.send(request, stream=True)
        if response.status_code >= 400:
            await response.aread()
            await response.aclose()
    except httpx.TransportError as error:
        raise _named("POST", url, error) from error
    _check_status("POST", url, response)
    return response


async def _request(
    method: str,
    url: str,
    payload: Mapping[str, Any] | None,
    max_retries: int,
    headers: Mapping[str, str] | None,
) -> Any:
    content, all_headers = _encoded(payload), _headers_for(url, headers)
    return await _retried(max_retries, lambda: _try_request(method, url, content, all_headers))


async def _try_request(method: str, url: str, content: bytes | None, headers: Mapping[str, str]) -> Any:
    try:
        response = await _client().request(method, url, content=content, headers=headers)
    except httpx.TransportError as error:
        raise _named(method, url, error) from error
    _check_status(method, url, response)
    if response.headers.get("content-type", "").startswith("application/json"):
        return orjson.loads(response.content)
    return response.text


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


def _encoded(payload: Mapping[str, Any] | None) -> bytes | None:
    return None if payload is None else orjson.dumps(payload)


def _headers_for(url: str, headers: Mapping[str, str] | None) -> dict[str, str]:
    own_headers = _settings.headers if _origin(url) in _settings.origins else {}
    return {"Content-Type": "application/json", **own_headers, **(headers or {})}


def _named(method: str, url: str, error: httpx.TransportError) -> httpx.TransportError:
    """The same error with a message that names the URL."""
    return type(error)(f"{method} {url}: {error or type(error).__name__}")


def _is_retryable(error: BaseException) -> bool:
    if isinstance(error, HttpStatusError):
        return error.retryable
    return isinstance(error, httpx.TransportError) and not isinstance(error, httpx.UnsupportedProtocol)


def _check_status(method: str, url: str, response: httpx.Response) -> None:
    if response.status_code >= 400:
        body = response.text[:ERROR_BODY_CHARACTERS]
        raise HttpStatusError(method, url, response.status_code, body)


def _client() -> httpx.AsyncClient:
    """The next of this event loop's clients."""
    loop = asyncio.get_running_loop()
    clients = _settings.clients.get(loop)
    if clients is None:
        clients = _settings.clients[loop] = cycle(_new_clients(min(CLIENTS_PER_LOOP, _settings.requests)))
    return next(clients)


def _new_clients(count: int) -> list[httpx.AsyncClient]:
    """They ignore proxy variables, as engines are never behind a proxy.

    Connections have no limit: a request must never wait for one, least of all an abort behind generations.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_S)
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    return [httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False) for _ in range(count)]


def is_port_available(port: int, host: str = "") -> bool:
    """Whether a server could listen on the port; the empty host stands for all interfaces."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def find_available_port(base: int, consecutive: int = 1) -> int:
    """The first port from ``base`` upwards such that it and the following ones are free.

    Raises:
        RuntimeError: there is none up to 65535.
    """
    run = 0
    for port in range(base, HIGHEST_PORT + 1):
        run = run + 1 if is_port_available(port) else 0
        if run == consecutive:
            return port - consecutive + 1
    raise RuntimeError(f"no {consecutive} consecutive free ports between {base} and {HIGHEST_PORT}")


def get_host_info() -> tuple[str, str]:
    """Host name and the address under which other nodes reach this one.

    ``SLIME_HOST_IP`` overrides the address; ``SLIME_PREFER_IPV6`` (1, true, yes) prefers IPv6.
    """
    hostname = socket.gethostname()
    if configured := os.environ.get("SLIME_HOST_IP"):
        return hostname, configured
    prefer_ipv6 = os.environ.get("SLIME_PREFER_IPV6", "").lower() in ("1", "true", "yes")
    families = (socket.AF_INET6, socket.AF_INET) if prefer_ipv6 else (socket.AF_INET, socket.AF_INET6)
    for family in families:
        if address := _routed_address(family):
            return hostname, address
    return hostname, "127.0.0.1"


def _routed_address(family: socket.AddressFamily) -> str | None:
    """The address of the interface that leads outside. Connecting a UDP socket sends no packet."""
    outside = "2001:4860:4860::8888" if family == socket.AF_INET6 else "8.8.8.8"
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((outside, 80))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host; names other than localhost count as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def wrap_ipv6(host: str) -> str:
    """The host as it stands in a URL: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def http_url(host: str, port: int) -> str:
    return f"http://{wrap_ipv6(host)}:{port}"
