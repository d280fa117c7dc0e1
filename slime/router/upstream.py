"""Sending a request on to a worker.

Bodies pass as they are: nothing here looks into them. A request is sent to another worker only if the first
could not be connected to; once it is on its way, tokens may have been sampled for it.
"""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import lru_cache

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from slime.router.metrics import Counts
from slime.router.pool import Worker, WorkerPool
from slime.router.settings import RouterSettings

CONNECT_TIMEOUT_S = 5.0
KEEPALIVE_S = 2.0
"""Idle connections are dropped before uvicorn, after 5 s, drops them while a request is on its way."""
READ_BUFFER = 2**18
ROUTING_KEY = "X-SMG-Routing-Key"
"""Requests with the same value go to the same worker."""

_OF_ONE_HOP = frozenset(
    [
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te"),
        *("trailer", "transfer-encoding", "upgrade", "host", "content-length", "expect"),
    ]
)
_NOT_OURS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
"""Headers that aiohttp would add of its own accord."""


class RefusedError(Exception):
    """The request was not answered.

    Attributes:
        status: 502, 503 or 504; with 503 no worker has seen the request.
        kind: a word for it, and ``str`` the sentence.
    """

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind

    @property
    def body(self) -> dict[str, object]:
        return {"error": {"type": self.kind, "code": self.kind, "message": str(self)}}


class Upstream:
    """The connections to all workers. Made within a running event loop."""

    def __init__(self, pool: WorkerPool, settings: RouterSettings, counts: Counts) -> None:
        self._pool, self._counts = pool, counts
        limit = -(-settings.max_connections // settings.processes)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=limit, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=settings.timeout, sock_connect=CONNECT_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_NOT_OURS,
            read_bufsize=READ_BUFFER,
        )

    async def close(self) -> None:
        await self._session.close()

    @asynccontextmanager
    async def answer(
        self, method: str, target: str, headers: CIMultiDictProxy[str], body: bytes
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer of a worker, whose body may be still to come.

        Args:
            target: path and query, as the client wrote them.

        Raises:
            RefusedError: there is none.
        """
        worker, response = await self._send(method, target, headers, body)
        try:
            yield response
        finally:
            worker.in_flight -= 1
            response.release() if response.content.at_eof() else response.close()

    async def _send(
        self, method: str, target: str, headers: CIMultiDictProxy[str], body: bytes
    ) -> tuple[Worker, aiohttp.ClientResponse]:
        session, tried = headers.get(ROUTING_KEY), list[Worker]()
        passed = end_to_end(headers)
        while (worker := self._pool.choose(session, tried)) is not None:
            if worker.api_key is not None:
                passed["Authorization"] = f"Bearer {worker.api_key}"
            try:
                return worker, await self._ask(worker, method, target, passed, body)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
                self._pool.refused(worker)
                self._counts["retries"] += 1
                tried.append(worker)
            except TimeoutError as error:
                message = f"{worker.url} did not answer within --slime-router-timeout"
                raise RefusedError(504, "worker_timeout", message) from error
            except (aiohttp.ClientError, OSError) as error:
                message = f"{worker.url} broke off: {type(error).__name__}: {error}"
                raise RefusedError(502, "worker_broke_off", message) from error
        self._counts["refusals"] += 1
        raise RefusedError(503, "no_available_workers", self._pool.why_none())

    async def _ask(
        self, worker: Worker, method: str, target: str, headers: CIMultiDict[str], body: bytes
    ) -> aiohttp.ClientResponse:
        """Until the head of the answer is there; on success the request stays counted as in flight."""
        worker.in_flight += 1
        try:
            return await self._session.request(
                method, _url(worker.url, target), headers=headers, data=body or None, allow_redirects=False
            )
        except BaseException:
            worker.in_flight -= 1
            raise


def end_to_end(headers: Iterable[tuple[str, str]] | CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """The headers that are meant for whoever is at the other end."""
    items = headers.items() if isinstance(headers, CIMultiDictProxy) else headers
    return CIMultiDict((name, value) for name, value in items if name.lower() not in _OF_ONE_HOP)


@lru_cache(maxsize=4096)
def _url(base: str, target: str) -> URL:
    return URL(base + target, encoded=True)
