"""The HTTP client below ``http_utils``: a session per event loop, and errors that name the URL.

aiohttp sends; its errors become httpx's, which rollout code and its plug-ins know. With a thousand requests
in flight a request of aiohttp takes a tenth of httpx's CPU time, whose pool looks at every connection for
each of them.
"""

import asyncio
import atexit
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import aiohttp
import httpx
from yarl import URL

CONNECT_TIMEOUT_S = 30.0
KEEPALIVE_S = 2.0
"""Idle connections are dropped before uvicorn, after 5 s, drops them while a request is on its way."""


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    status: int
    content_type: str
    body: bytes


class Sessions:
    """The sessions of this process, one for each event loop that sends.

    They ignore proxy variables, as engines are never behind a proxy. Connections have no limit: a request
    must never wait for one, least of all an abort behind generations. An answer may take arbitrarily long.
    """

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}

    def current(self) -> aiohttp.ClientSession:
        """The running loop's."""
        loop = asyncio.get_running_loop()
        session = self._by_loop.get(loop)
        if session is None:
            self._forget([loop for loop in self._by_loop if loop.is_closed()])
            session = self._by_loop[loop] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return session

    def end(self) -> None:
        """For the end of the process: nothing is sent any more, and no loop can be waited for."""
        self._forget(list(self._by_loop))

    def _forget(self, loops: list[asyncio.AbstractEventLoop]) -> None:
        for loop in loops:
            session = self._by_loop.pop(loop)
            if session.connector is not None:
                steps = session.connector.close().__await__()
                with suppress(StopIteration):
                    next(steps)  # lets go of the connections; nothing can be awaited any more
            session.detach()


_sessions = Sessions()
atexit.register(_sessions.end)


async def send(method: str, url: str, content: bytes | None, headers: Mapping[str, str]) -> Answer:
    """One request and its whole answer, whatever its status.

    Raises:
        httpx.TransportError: there was no answer; the message names the URL.
    """
    try:
        async with _sessions.current().request(
            method, URL(url), data=content, headers=headers, allow_redirects=False
        ) as response:
            return Answer(response.status, response.headers.get("content-type", ""), await response.read())
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise _transport_error(method, url, error) from error


async def stream_lines(
    method: str, url: str, content: bytes | None, headers: Mapping[str, str]
) -> AsyncGenerator[bytes | Answer, None]:
    """The lines of an answer as they come, without their ends; of an error's answer, the ``Answer`` alone.

    Raises:
        httpx.TransportError: the connection failed; the message names the URL.
    """
    try:
        async with _sessions.current().request(
            method, URL(url), data=content, headers=headers, allow_redirects=False
        ) as response:
            if response.status >= 400:
                kind = response.headers.get("content-type", "")
                yield Answer(response.status, kind, await response.read())
                return
            yield b""  # it has begun
            rest = b""
            async for part in response.content.iter_any():
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    yield line.removesuffix(b"\r")
            yield rest
    except (aiohttp.ClientError, OSError) as error:
        raise _transport_error(method, url, error) from error


def _transport_error(method: str, url: str, error: Exception) -> httpx.TransportError:
    """The one of httpx's errors that says the same; what is no address of a server is never tried again."""
    kind: type[httpx.TransportError] = httpx.ReadError
    if isinstance(error, aiohttp.InvalidURL | ValueError):
        kind = httpx.UnsupportedProtocol
    elif isinstance(error, TimeoutError):
        kind = httpx.ConnectTimeout
    elif isinstance(error, aiohttp.ClientConnectorError):
        kind = httpx.ConnectError
    elif isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError):
        kind = httpx.RemoteProtocolError
    return kind(f"{method} {url}: {str(error) or type(error).__name__}")
