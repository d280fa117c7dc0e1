"""Sending a request on to a worker.

Bodies pass as they are: nothing here looks into them, but where workers do halves of a request, or for the
prompt with ``--router-policy cache_aware``. It is sent to another worker only if the first could not be
connected to: once on its way, tokens may be sampled for it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from slime.router.halves import HalvedRequest, Head, Reply, Unmet, is_halved
from slime.router.metrics import Counts
from slime.router.pool import Worker, WorkerKind, WorkerPool
from slime.router.prefixes import CacheAware, Prompt, prompt_of
from slime.router.settings import RouterSettings
from slime.utils.async_utils import Slots
from slime.utils.http_connection import CannotConnect, HttpConnection
from slime.utils.http_pool import ConnectionPool, Origin

ROUTING_KEY = b"x-smg-routing-key"
"""Requests with the same value of this header go to the same worker."""

_OF_ONE_HOP = frozenset(
    [
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade", b"host", b"content-length", b"expect"),
    ]
)
RawHeaders = Sequence[tuple[bytes, bytes]]


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


class BrokenOff(RefusedError):
    """A worker ended its answer before it was complete."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(
            502, "worker_broke_off", f"the worker broke off: {type(error).__name__}: {error}".rstrip(": ")
        )


def choosing_pool(settings: RouterSettings, counts: Counts) -> WorkerPool:
    """The workers, as requests are sent to them."""
    prefixes = None if settings.cache_aware is None else CacheAware(settings.cache_aware, counts)
    return WorkerPool(settings.failure_threshold, prefixes)


class Upstream:
    """The connections to all workers. Made within a running event loop."""

    def __init__(self, pool: WorkerPool, settings: RouterSettings, counts: Counts) -> None:
        self._pool, self._counts, self._timeout = pool, counts, settings.timeout
        self._settings = settings
        self._connections = Connections(self._limit)

    def _limit(self) -> int:
        """Connections of this process."""
        of_each = self._settings.connections_of_each
        total = self._settings.max_connections or of_each * max(1, len(self._pool))
        return -(-total // self._settings.processes)

    def _prompt(self, method: bytes, target: bytes, body: bytes) -> Prompt | None:
        """What to choose a worker by, if requests are looked into for that."""
        if self._settings.cache_aware is None or not is_halved(method, target):
            return None
        return prompt_of(body)

    async def close(self) -> None:
        self._connections.close()

    @asynccontextmanager
    async def answer(
        self, method: bytes, target: bytes, headers: RawHeaders, body: bytes
    ) -> AsyncIterator[Reply]:
        """The answer of a worker, whose body may be still to come.

        Args:
            target: path and query, as the client wrote them.

        Raises:
            RefusedError: there is none; from within the block too, if it breaks off.
        """
        try:
            async with asyncio.timeout(self._timeout), self._asked(method, target, headers, body) as reply:
                yield reply
        except TimeoutError as error:
            message = f"no answer within {self._timeout} s (--slime-router-timeout)"
            raise RefusedError(504, "worker_timeout", message) from error
        except OSError as error:
            self._counts["broken"] += 1
            raise BrokenOff(error) from error

    @asynccontextmanager
    async def _asked(
        self, method: bytes, target: bytes, headers: RawHeaders, body: bytes
    ) -> AsyncIterator[Reply]:
        if self._pool.has_halves and is_halved(method, target):
            passed, session = _passed(headers)
            async with self._in_halves(target, passed, session, body) as answer:
                yield answer
            return
        worker, reply = await self._send(method, target, headers, body)
        try:
            yield reply
        finally:
            worker.in_flight -= 1
            self._connections.finish(worker.url, reply)

    @asynccontextmanager
    async def _in_halves(
        self, target: bytes, passed: list[tuple[bytes, bytes]], session: str | None, body: bytes
    ) -> AsyncIterator[Reply]:
        """The answer of a worker that decodes what another one, which a session stays with, has prefilled."""
        try:
            request = HalvedRequest(body)
        except ValueError as error:
            raise RefusedError(400, "bad_request", str(error)) from error
        tried: list[Worker] = []
        prompt = self._prompt(b"POST", target, body)
        while (prefill := self._pool.choose(session, tried, WorkerKind.PREFILL, prompt)) is not None:
            decode = self._pool.choose(None, tried, WorkerKind.DECODE)
            if decode is None:
                break
            own = request.meeting_at(urlsplit(prefill.url).hostname, prefill.bootstrap_port)
            async with self._both((prefill, decode), target, passed, own) as heads:
                try:
                    answer = await request.answered(*heads)
                except Unmet as error:
                    self._without((prefill, decode)[error.half], tried)
                    continue
                yield answer
                return
        self._counts["refusals"] += 1
        raise RefusedError(503, "no_available_workers", self._pool.why_none())

    @asynccontextmanager
    async def _both(
        self, halves: tuple[Worker, Worker], target: bytes, passed: RawHeaders, body: bytes
    ) -> AsyncIterator[list[Head]]:
        """The heads of two answers, which may be still to come; what is not read by the end is broken off."""
        heads = []
        for worker in halves:
            asked = self._connections.ask(worker.url, b"POST", target, _shown_to(worker, passed), body)
            heads.append(asyncio.create_task(asked, name=f"half of a request at {worker.url}"))
            worker.in_flight += 1
        try:
            yield heads
        finally:
            for worker in halves:
                worker.in_flight -= 1
            # Also for a client that goes away meanwhile: neither's connection may count as in use for good.
            finish = self._connections.finish_half
            done = [finish(worker.url, head) for worker, head in zip(halves, heads, strict=True)]
            await asyncio.shield(asyncio.gather(*done))

    def _without(self, worker: Worker, tried: list[Worker]) -> None:
        """Has a worker that could not be connected to left out."""
        self._pool.refused(worker)
        self._counts["retries"] += 1
        tried.append(worker)

    async def _send(
        self, method: bytes, target: bytes, headers: RawHeaders, body: bytes
    ) -> tuple[Worker, HttpConnection]:
        """The worker's request is counted as in flight from here on."""
        passed, session = _passed(headers)
        tried: list[Worker] = []
        prompt = self._prompt(method, target, body)
        while (worker := self._pool.choose(session, tried, prompt=prompt)) is not None:
            worker.in_flight += 1
            own = _shown_to(worker, passed)
            try:
                return worker, await self._connections.ask(worker.url, method, target, own, body)
            except CannotConnect:
                worker.in_flight -= 1
                self._without(worker, tried)
            except BaseException:
                worker.in_flight -= 1
                raise
        self._counts["refusals"] += 1
        raise RefusedError(503, "no_available_workers", self._pool.why_none())


def _passed(headers: RawHeaders) -> tuple[list[tuple[bytes, bytes]], str | None]:
    """The headers that are meant for the worker, and the session."""
    passed = end_to_end(headers)
    session = next((value.decode("latin-1") for name, value in passed if name.lower() == ROUTING_KEY), None)
    return passed, session


def _shown_to(worker: Worker, passed: RawHeaders) -> RawHeaders:
    """The headers, with the worker's own key if it has one."""
    if worker.api_key is None:
        return passed
    others = [(name, value) for name, value in passed if name.lower() != b"authorization"]
    return [*others, (b"Authorization", f"Bearer {worker.api_key}".encode())]


def end_to_end(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """The headers that are meant for whoever comes after the router: not those that ``Connection`` names.

    RFC 9110, section 7.6.1.
    """
    dropped = _OF_ONE_HOP
    for name, value in headers:
        if name.lower() == b"connection":
            dropped = dropped.union(option.strip().lower() for option in value.split(b","))
    return [(name, value) for name, value in headers if name.lower() not in dropped]


CONNECT_TIMEOUT_S = 5.0
_WITHOUT_BODY = (b"GET", b"HEAD", b"DELETE", b"OPTIONS")


class Connections:
    """The connections to every worker: as many as there are requests in flight.

    Args:
        limit: of all connections, which may change; further requests wait.
    """

    def __init__(self, limit: int | Callable[[], int]) -> None:
        self._free = Slots(limit)
        self._pool = ConnectionPool(CONNECT_TIMEOUT_S)

    async def ask(
        self, base: str, method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> HttpConnection:
        """Sends a request and returns when the head of the answer is there; then ``finish`` is due.

        Raises:
            CannotConnect: to the worker.
            ConnectionError: the connection broke, or the answer is not HTTP.
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

    async def finish_half(self, base: str, head: Head) -> None:
        """Does so for an answer whose head may be still to come, and of which nobody reads the rest."""
        head.cancel()
        await asyncio.wait({head})
        if not head.cancelled() and head.exception() is None:
            connection = head.result()
            if connection.complete:
                await connection.read()
            self.finish(base, connection)

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
