"""Sandboxes that are started before anybody needs them.

async with SandboxPool(lambda: ContainerSandbox("debian:12"), size=4) as pool:
    async with pool.sandbox() as sandbox:
        code, output = await sandbox.exec("ls")
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Generic, Self, TypeVar

from slime.agent.sandbox.protocol import Sandbox, SandboxError
from slime.agent.sandbox.snapshots import Prepared

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=Sandbox)
_OLDEST_S = 600.0
_END_S = 120.0


class SandboxPool(Generic[S]):
    """Keeps so many sandboxes ready. Each is given out once: it ends with its use, and another starts.

    Whoever finds none ready starts one, and waits for that; so there are as many in use as there are users,
    and ``size`` more. Of those that are ready when this process is killed a container ends with its lifetime
    or when another process finds it, a local sandbox with this process.

    Args:
        make: makes one, which has not been entered.
        size: how many are kept ready.
        oldest_s: one that has been ready for longer is replaced before use, since the time that a sandbox
            lives begins with its start.
        at_once: how many are started in advance at a time.
        prepare: prepares one before anybody uses it. Where the sandbox has snapshots that is done once, and
            all of the pool start from what has come of it.
    """

    def __init__(
        self,
        make: Callable[[], S],
        *,
        size: int = 2,
        oldest_s: float = _OLDEST_S,
        at_once: int = 2,
        prepare: Callable[[S], Awaitable[None]] | None = None,
    ) -> None:
        if size < 1 or at_once < 1 or oldest_s <= 0:
            given = f"size={size}, at_once={at_once}, oldest_s={oldest_s:g}"
            raise ValueError(f"{given} (wanted: at least 1, at least 1, above 0)")
        self._make, self._size, self._oldest_s = make, size, oldest_s
        self._prepared = None if prepare is None else Prepared(make, prepare)
        self._ready: deque[tuple[float, S]] = deque()
        self._starts = asyncio.Semaphore(at_once)
        self._starting: set[asyncio.Task[None]] = set()
        self._coming = 0
        self._ending: set[asyncio.Task[None]] = set()
        self._is_open = False

    async def __aenter__(self) -> Self:
        self._is_open = True
        self._start_more()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @property
    def ready(self) -> int:
        """How many sandboxes can be given out at once."""
        return len(self._ready)

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[S]:
        """A sandbox that nobody has used, until the end of the block.

        Raises:
            SandboxError: the pool is not open, or none can be started.
        """
        if not self._is_open:
            raise SandboxError("SandboxPool: is not open (wanted: async with)")
        taken = self._take() or await self._new()
        try:
            yield taken
        finally:
            self._end(taken)

    def _take(self) -> S | None:
        """The one that has been ready for the longest time, unless for too long."""
        taken = None
        while self._ready and taken is None:
            since, one = self._ready.popleft()
            if time.monotonic() - since > self._oldest_s:
                self._end(one)
            else:
                taken = one
        self._start_more()
        return taken

    def _start_more(self) -> None:
        for _ in range(self._size - len(self._ready) - self._coming):
            self._coming += 1
            task = asyncio.create_task(self._start())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _start(self) -> None:
        try:
            async with self._starts:
                one = await self._new()
            self._ready.append((time.monotonic(), one))
        except SandboxError as error:  # whoever needs one tries again, and is told
            logger.warning("a sandbox could not be started in advance: %s", error)
        finally:
            self._coming -= 1

    async def _new(self) -> S:
        return await (self._prepared.start() if self._prepared else self._make().__aenter__())

    def _end(self, one: S) -> None:
        """Ends a sandbox while its user goes on."""
        task = asyncio.create_task(self._end_now(one))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end_now(self, one: S) -> None:
        try:
            await one.__aexit__(None, None, None)
        except Exception as error:  # of the sandbox's class, which may be a user's: the others end too
            logger.warning("a sandbox could not be ended: %s", error)

    async def close(self) -> None:
        """Ends the sandboxes that are ready; those in use end with their use."""
        self._is_open = False
        for task in self._starting:
            task.cancel()
        if self._starting:
            await asyncio.wait(self._starting, timeout=_END_S)
        while self._ready:
            self._end(self._ready.popleft()[1])
        if self._ending:
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    await asyncio.gather(*self._ending)
        if self._prepared is not None:
            await self._prepared.close()
