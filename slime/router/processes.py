"""A router of several processes on one port.

The parent holds the pool, checks health and answers for the router itself. Its children share the port and
pass requests on, each by its own count of what is in flight. A change of the pool is told to all children
before whoever asked for it gets an answer.
"""

import asyncio
import itertools
import multiprocessing
import socket
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import orjson

from slime.router.admin import Admin, AdminAnswer, AdminRequest
from slime.router.front import Front
from slime.router.health import HealthWatch
from slime.router.metrics import Counts
from slime.router.pool import WorkerPool
from slime.router.serving import listening, stop_signal, until_first
from slime.router.settings import RouterSettings
from slime.router.upstream import Upstream, choosing_pool

LINE_BYTES = 2**26
SPREAD_TIMEOUT_S = 30.0


class ChildEnded(RuntimeError):
    """A process of the router is gone, and with it the requests that it worked on."""


class Line:
    """JSON messages over a socket, in both directions, with answers.

    Args:
        on_message: what to do with what the other side says of its own accord; its result is the answer.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, on_message: Callable[[Any], Any]
    ) -> None:
        self._reader, self._writer, self._on_message = reader, writer, on_message
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @staticmethod
    async def over(end: socket.socket, on_message: Callable[[Any], Any]) -> "Line":
        reader, writer = await asyncio.open_connection(sock=end, limit=LINE_BYTES)
        return Line(reader, writer, on_message)

    async def ask(self, message: Any) -> Any:
        """The other side's answer."""
        number = next(self._numbers)
        self._waiting[number] = future = asyncio.get_running_loop().create_future()
        self._write({"ask": number, "message": message})
        try:
            return await future
        finally:
            del self._waiting[number]

    async def run(self) -> None:
        """Reads until the other side has ended."""
        while line := await self._reader.readline():
            entry = orjson.loads(line)
            if "ask" in entry:
                task = asyncio.create_task(self._answer(entry))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif (future := self._waiting.get(entry["answer"])) is not None and not future.done():
                future.set_result(entry["message"])

    async def _answer(self, entry: dict[str, Any]) -> None:
        self._write({"answer": entry["ask"], "message": await self._on_message(entry["message"])})

    def _write(self, entry: dict[str, Any]) -> None:
        self._writer.write(orjson.dumps(entry) + b"\n")


class Parent:
    """The process that knows the workers."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._pool, self._counts = WorkerPool(settings.failure_threshold), Counts()
        self._lines: list[Line] = []
        self._spreading = asyncio.Lock()
        self._all_serve: asyncio.Task[None]

    async def run(self) -> None:
        """Runs until SIGTERM.

        Raises:
            ChildEnded: a child has ended.
        """
        stop = stop_signal()
        health = HealthWatch(self._pool, self._settings, self._spread)
        self._admin = Admin(self._pool, self._counts, health.check, self._spread)
        children = [await self._start_child() for _ in range(self._settings.processes)]
        self._all_serve = asyncio.create_task(self._first_spread())
        try:
            await until_first(stop.wait(), health.task, *(self._listen(line) for line in self._lines))
        except ChildEnded:
            if not stop.is_set():
                raise
        finally:
            self._all_serve.cancel()
            for child in children:
                child.terminate()
            await health.close()

    async def _start_child(self) -> Any:
        ours, theirs = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        child = context.Process(target=_child, args=(self._settings, theirs), daemon=True)
        child.start()
        theirs.close()
        self._lines.append(await Line.over(ours, self._answer))
        return child

    async def _listen(self, line: Line) -> None:
        await line.run()
        raise ChildEnded("a process of the router has ended")

    async def _first_spread(self) -> None:
        """A child answers once it listens, and may take long to start."""
        await asyncio.gather(*(line.ask(self._pool.table()) for line in self._lines))

    async def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answers once all children serve: else a change of the pool would have to wait for the others."""
        await asyncio.shield(self._all_serve)
        return asdict(await self._admin.answer(AdminRequest(**message)))

    async def _spread(self) -> None:
        """Tells all children the pool, and sums up what they count."""
        async with self._spreading, asyncio.timeout(SPREAD_TIMEOUT_S):
            table = self._pool.table()
            found = await asyncio.gather(*(line.ask(table) for line in self._lines))
        self._counts.clear()
        for child in found:
            self._counts.update(child["counts"])
        for worker in self._pool:
            worker.in_flight = sum(child["in_flight"].get(worker.url, 0) for child in found)


class _ParentAdmin:
    """The router's own answers, which only the parent knows."""

    def __init__(self, line: Line) -> None:
        self._line = line

    async def answer(self, request: AdminRequest) -> AdminAnswer:
        return AdminAnswer(**await self._line.ask(asdict(request)))


def _child(settings: RouterSettings, end: socket.socket) -> None:
    asyncio.run(_run_child(settings, end))


async def _run_child(settings: RouterSettings, end: socket.socket) -> None:
    """Passes requests on until SIGTERM or the end of the parent."""
    stop = stop_signal()
    counts = Counts()
    pool = choosing_pool(settings, counts)
    upstream = Upstream(pool, settings, counts)

    async def take_over(table: list[dict[str, Any]]) -> dict[str, Any]:
        pool.apply(table)
        return {"counts": counts, "in_flight": {worker.url: worker.in_flight for worker in pool}}

    line = await Line.over(end, take_over)
    front = Front(upstream, _ParentAdmin(line), counts, settings.api_key, settings.host)
    async with listening(front, settings.host, settings.port, shared=True):
        await until_first(stop.wait(), line.run())
    await upstream.close()


async def run_parent(settings: RouterSettings) -> None:
    """Starts the children and looks after them until SIGTERM.

    Raises:
        OSError: the port is in use.
        ChildEnded: a child has ended.
    """
    with socket.socket() as probe:
        # Children may share the port with each other; somebody else's would be shared without a word.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((settings.host, settings.port))
    await Parent(settings).run()
