"""Connections to workers, kept open between requests."""

import asyncio
from collections.abc import Iterable

from slime.utils.http_connection import CannotConnect, HttpConnection
from slime.utils.http_pool import ConnectionPool, Origin

CONNECT_TIMEOUT_S = 5.0
_WITHOUT_BODY = (b"GET", b"HEAD", b"DELETE", b"OPTIONS")


class Connections:
    """The connections to every worker: as many as there are requests in flight.

    Args:
        limit: of all connections; further requests wait.
    """

    def __init__(self, limit: int) -> None:
        self._free = asyncio.Semaphore(limit)
        self._pool = ConnectionPool(CONNECT_TIMEOUT_S)

    async def ask(
        self, base: str, method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> HttpConnection:
        """Sends a request and returns when the head of the answer is there; then ``finish`` is due.

        Raises:
            CannotConnect: to the worker.
            ConnectionError: the connection broke, or the answer is no HTTP.
        """
        origin = Origin.of(base)
        await self._free.acquire()
        connection = None
        try:
            connection = await self._pool.take(origin)
            await connection.ask(_head(method, target, origin, headers, len(body)) + body)
        except BaseException as error:
            self._free.release()
            if connection is not None:
                connection.close()
            if isinstance(error, CannotConnect):
                raise CannotConnect(f"{base}: {error}") from error
            raise
        return connection

    def finish(self, base: str, connection: HttpConnection) -> None:
        """Keeps the connection if the whole body was read, else closes it, which ends the worker's work."""
        self._free.release()
        self._pool.give_back(Origin.of(base), connection)

    def close(self) -> None:
        self._pool.close()


def _head(
    method: bytes, target: bytes, origin: Origin, headers: Iterable[tuple[bytes, bytes]], length: int
) -> bytes:
    lines = [
        b"%s %s HTTP/1.1\r\nHost: %s" % (method, target, origin.netloc.encode()),
        *(name + b": " + value for name, value in headers),
    ]
    if length or method not in _WITHOUT_BODY:
        lines.append(b"Content-Length: %d" % length)
    return b"\r\n".join(lines) + b"\r\n\r\n"
