"""Connections to workers, kept open between requests.

aiohttp parses; its client session is left out, which would look at much that a router only passes on and
costs as much as all the rest.
"""

import asyncio
import ssl
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

from aiohttp.client_proto import ResponseHandler
from aiohttp.streams import StreamReader
from multidict import CIMultiDictProxy

CONNECT_TIMEOUT_S = 5.0
KEEPALIVE_S = 2.0
"""Idle connections are dropped before uvicorn, after 5 s, drops them while a request is on its way."""
READ_BUFFER = 2**18
HEADER_BYTES = 2**16


class CannotConnect(Exception):
    """No connection came about: the worker has not seen anything."""


@dataclass(frozen=True)
class Reply:
    """The head of an answer, and a reader of its body.

    Attributes:
        content_length: as the worker said; None if it did not.
    """

    status: int
    reason: str
    headers: CIMultiDictProxy[str]
    content_length: int | None
    content: StreamReader
    connection: ResponseHandler


class Connections:
    """To every worker as many as there are requests in flight.

    Args:
        limit: of all connections; further requests wait.
    """

    def __init__(self, limit: int) -> None:
        self._free = asyncio.Semaphore(limit)
        self._idle: dict[str, list[tuple[float, ResponseHandler]]] = {}

    async def ask(
        self, base: str, method: str, target: str, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> Reply:
        """Sends a request and returns when the head of the answer is there; then ``finish`` is due.

        Raises:
            CannotConnect: to the worker.
            ClientError, HttpProcessingError, OSError: the connection broke, or the answer is no HTTP.
        """
        await self._free.acquire()
        connection = None
        try:
            connection = self._reused(base)
            if connection is None:  # an idle one is falsy, being an empty queue
                connection = await _connect(base)
            transport = connection.transport
            if transport is None:
                raise CannotConnect(f"{base}: the connection was closed")
            transport.write(_head(method, target, base, headers, len(body)) + body)  # type: ignore[attr-defined]
            while (message := await connection.read())[0].code < 200:
                pass  # says only that it goes on
        except BaseException:
            self._free.release()
            if connection is not None:
                connection.close()
            raise
        head, content = message
        length = head.headers.get("Content-Length")
        return Reply(
            head.code, head.reason, head.headers, int(length) if length else None, content, connection
        )

    def finish(self, base: str, reply: Reply) -> None:
        """Keeps the connection if the whole body was read, else closes it, which ends the worker's work."""
        self._free.release()
        if reply.content.is_eof() and not reply.connection.should_close:
            self._idle.setdefault(base, []).append((time.monotonic(), reply.connection))
        else:
            reply.connection.close()

    def close(self) -> None:
        for idle in self._idle.values():
            for _, connection in idle:
                connection.close()
        self._idle.clear()

    def _reused(self, base: str) -> ResponseHandler | None:
        """One that was used a moment ago."""
        idle = self._idle.get(base)
        while idle:
            since, connection = idle.pop()
            if connection.is_connected() and time.monotonic() - since < KEEPALIVE_S:
                return connection
            connection.close()
        return None


async def _connect(base: str) -> ResponseHandler:
    host, port, secure, _ = _place(base)
    loop = asyncio.get_running_loop()
    context = ssl.create_default_context() if secure else None
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await loop.create_connection(
                lambda: ResponseHandler(loop), host, port, ssl=context
            )
    except (OSError, TimeoutError) as error:
        raise CannotConnect(f"{base}: {type(error).__name__}: {error}") from error
    connection.set_response_params(
        read_until_eof=True,
        auto_decompress=False,
        read_bufsize=READ_BUFFER,
        max_line_size=HEADER_BYTES,
        max_field_size=HEADER_BYTES,
    )
    return connection


def _head(method: str, target: str, base: str, headers: Iterable[tuple[bytes, bytes]], length: int) -> bytes:
    lines = [
        b"%s %s HTTP/1.1\r\nHost: %s" % (method.encode("ascii"), target.encode("latin-1"), _place(base)[3]),
        *(name + b": " + value for name, value in headers),
    ]
    if length or method not in ("GET", "HEAD", "DELETE", "OPTIONS"):
        lines.append(b"Content-Length: %d" % length)
    return b"\r\n".join(lines) + b"\r\n\r\n"


@lru_cache(maxsize=1024)
def _place(base: str) -> tuple[str, int, bool, bytes]:
    """Host, port, whether by TLS, and what stands in ``Host``."""
    parts = urlsplit(base)
    secure = parts.scheme == "https"
    return parts.hostname or "", parts.port or (443 if secure else 80), secure, parts.netloc.encode()
