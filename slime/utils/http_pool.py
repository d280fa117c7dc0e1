"""HTTP connections that are kept between requests."""

import asyncio
import ssl
from dataclasses import dataclass
from functools import cache, lru_cache
from urllib.parse import urlsplit

from slime.utils.http_connection import CannotConnect, HttpConnection

KEEPALIVE_S = 2.0
"""Idle connections are dropped before uvicorn, after 5 s, drops them while a request is on its way."""


@dataclass(frozen=True)
class Origin:
    """The address of a server; ``netloc`` is what stands in ``Host``."""

    host: str
    port: int
    secure: bool
    netloc: str

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(url: str) -> "Origin":
        """The server that a URL names.

        Raises:
            ValueError: it names none.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not the address of a server (wanted: http://host:port)")
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        return Origin(parts.hostname, port, secure, parts.netloc.rpartition("@")[2])


class ConnectionPool:
    """The connections of one event loop. To every server it has as many as there are requests in flight.

    Args:
        connect_timeout: in seconds, TLS included.
    """

    def __init__(self, connect_timeout: float) -> None:
        self._timeout = connect_timeout
        self._loop = asyncio.get_running_loop()
        self._idle: dict[Origin, list[tuple[float, HttpConnection]]] = {}
        self._sweeper: asyncio.TimerHandle | None = None

    async def take(self, origin: Origin) -> HttpConnection:
        """One that was used a moment ago, or a new one.

        Raises:
            CannotConnect: to this server.
        """
        idle = self._idle.get(origin)
        while idle:
            since, connection = idle.pop()
            if connection.reusable and self._loop.time() - since < KEEPALIVE_S:
                return connection
            connection.close()
        return await self._connect(origin)

    def give_back(self, origin: Origin, connection: HttpConnection) -> None:
        """Keeps it if the whole answer was read, else closes it, which ends the server's work."""
        if not connection.reusable:
            connection.close()
            return
        self._idle.setdefault(origin, []).append((self._loop.time(), connection))
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(KEEPALIVE_S, self._sweep)

    def close(self) -> None:
        """Closes those that are idle."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for idle in self._idle.values():
            for _, connection in idle:
                connection.close()
        self._idle.clear()

    def _sweep(self) -> None:
        """Closes what nobody has used for a while."""
        oldest = self._loop.time() - KEEPALIVE_S
        for origin, idle in list(self._idle.items()):
            young = next((at for at, (since, _) in enumerate(idle) if since > oldest), len(idle))
            for _, connection in idle[:young]:
                connection.close()
            self._idle[origin] = idle[young:]
            if not self._idle[origin]:
                del self._idle[origin]
        self._sweeper = self._loop.call_later(KEEPALIVE_S, self._sweep) if self._idle else None

    async def _connect(self, origin: Origin) -> HttpConnection:
        context = _tls() if origin.secure else None
        try:
            async with asyncio.timeout(self._timeout):
                _, connection = await self._loop.create_connection(
                    HttpConnection, origin.host, origin.port, ssl=context
                )
        except (OSError, TimeoutError) as error:
            raise CannotConnect(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        return connection


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
