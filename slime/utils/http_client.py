"""The HTTP client below ``http_utils``: a pool of connections per event loop, and errors that name the URL.

Errors are httpx's, which rollout code and its plug-ins know. Proxy variables are not looked at, as engines
are never behind a proxy. Connections have no limit: a request must never wait for one, least of all an abort
behind generations. An answer may take arbitrarily long.
"""

import asyncio
import base64
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import httpx

from slime.utils.http_connection import BrokenOff, CannotConnect, HttpConnection
from slime.utils.http_pool import KEEPALIVE_S, ConnectionPool, Origin

__all__ = ["KEEPALIVE_S", "Answer", "send", "stream_lines"]

CONNECT_TIMEOUT_S = 30.0
_DEFAULTS = {"User-Agent": "slime", "Accept": "*/*", "Accept-Encoding": "identity"}


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    status: int
    content_type: str
    body: bytes


@dataclass(frozen=True)
class Target:
    """What a URL says: the server, and what stands in a request to it."""

    origin: Origin
    path: str
    headers: tuple[tuple[str, str], ...]

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(url: str) -> "Target":
        """Returns the address of a URL, whose user and password become a header.

        Raises:
            ValueError, httpx.InvalidURL: it names no server.
        """
        parsed = httpx.URL(url)
        headers = {"Host": parsed.netloc.decode()}
        if parsed.userinfo:
            shown = f"{parsed.username}:{parsed.password}".encode()
            headers["Authorization"] = f"Basic {base64.b64encode(shown).decode()}"
        return Target(Origin.of(url), parsed.raw_path.decode(), tuple(headers.items()))


_pools: dict[asyncio.AbstractEventLoop, ConnectionPool] = {}


def _pool() -> ConnectionPool:
    """The running loop's."""
    loop = asyncio.get_running_loop()
    if loop not in _pools:
        for ended in [loop for loop in _pools if loop.is_closed()]:
            del _pools[ended]
        _pools[loop] = ConnectionPool(CONNECT_TIMEOUT_S)
    return _pools[loop]


async def send(method: str, url: str, content: bytes | None, headers: Mapping[str, str]) -> Answer:
    """One request and its whole answer, whatever its status.

    Raises:
        httpx.TransportError: there was no answer; the message names the URL.
    """
    try:
        target = Target.of(url)
        request = _request(method, target, content, headers)
        pool = _pool()
        connection = await pool.take(target.origin)
        try:
            connection.send(request)
            return _answer(connection, await connection.read())
        finally:
            pool.give_back(target.origin, connection)
    except (httpx.InvalidURL, OSError, ValueError) as error:
        raise _transport_error(method, url, error) from error


async def stream_lines(
    method: str, url: str, content: bytes | None, headers: Mapping[str, str]
) -> AsyncGenerator[bytes | Answer, None]:
    """The lines of an answer as they come, without their ends; of an error's answer, the ``Answer`` alone.

    Raises:
        httpx.TransportError: the connection failed; the message names the URL.
    """
    try:
        target = Target.of(url)
        request = _request(method, target, content, headers)
        pool = _pool()
        connection = await pool.take(target.origin)
        try:
            await connection.ask(request)
            if connection.status >= 400:
                yield _answer(connection, await connection.read())
                return
            _check_coding(connection)
            yield b""  # it has begun
            rest = b""
            async for part in connection.parts():
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    yield line.removesuffix(b"\r")
            yield rest
        finally:
            pool.give_back(target.origin, connection)
    except (httpx.InvalidURL, OSError, ValueError) as error:
        raise _transport_error(method, url, error) from error


def _request(method: str, target: Target, content: bytes | None, headers: Mapping[str, str]) -> bytes:
    """The bytes of a request.

    Raises:
        ValueError: a header holds the end of a line.
    """
    fields = {**_DEFAULTS, **dict(target.headers), **headers}
    if content is not None or method not in ("GET", "HEAD"):
        fields["Content-Length"] = str(len(content or b""))
    lines = [f"{method} {target.path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    head = "\r\n".join(lines)
    if head.count("\n") != len(fields) or head.count("\r") != len(fields) or "\0" in head:
        raise ValueError("a header holds the end of a line")
    return head.encode("latin-1") + b"\r\n\r\n" + (content or b"")


def _answer(connection: HttpConnection, body: bytes) -> Answer:
    _check_coding(connection)
    content_type = connection.header(b"content-type") or b""
    return Answer(connection.status, content_type.decode("latin-1"), body)


def _check_coding(connection: HttpConnection) -> None:
    coding = connection.header(b"content-encoding") or b"identity"
    if coding != b"identity":
        raise ValueError(f"the answer is encoded as {coding.decode('latin-1')} (wanted: identity)")


def _transport_error(method: str, url: str, error: Exception) -> httpx.TransportError:
    """The one of httpx's errors that says the same; a URL without a server is never tried again."""
    kind: type[httpx.TransportError] = httpx.ReadError
    if isinstance(error, httpx.InvalidURL | ValueError):
        kind = httpx.UnsupportedProtocol
    elif isinstance(error, CannotConnect):
        timed_out = isinstance(error.__cause__, TimeoutError)
        kind = httpx.ConnectTimeout if timed_out else httpx.ConnectError
    elif isinstance(error, BrokenOff):
        kind = httpx.RemoteProtocolError
    return kind(f"{method} {url}: {str(error) or type(error).__name__}")
