"""Running coroutines from synchronous code, on one event loop that lives in a background thread."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from functools import cache
from typing import Any, Literal, TypeVar

T = TypeVar("T")


@cache
def get_async_loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process's background thread; started at the first call."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run_for_ever, args=(loop,), name="slime-event-loop", daemon=True).start()
    return loop


def _run_for_ever(loop: asyncio.AbstractEventLoop) -> None:
    """A task that calls sys.exit ends ``run_forever``; whoever awaits it, and all others, need the loop."""
    while not loop.is_closed():
        with contextlib.suppress(SystemExit):
            loop.run_forever()
            return


def run(coro: Coroutine[Any, Any, T]) -> T:
    """Wait for ``coro`` on the background loop; cancel it if the wait is interrupted.

    Raises:
        RuntimeError: it called sys.exit.
    """
    future = asyncio.run_coroutine_threadsafe(coro, get_async_loop())
    try:
        return future.result()
    except SystemExit as error:
        raise RuntimeError(f"{coro!r}: something in it called sys.exit({error.code!r})") from error
    except BaseException:
        future.cancel()
        raise


class Slots:
    """A semaphore that hands a slot on to whoever has waited longest; with ten thousand who wait, too.

    ``asyncio.Semaphore`` looks, at each release, at all that it has woken and that have not run yet.

    Args:
        limit: how many there are, or what says so whenever a slot is taken or given back. Where that has
            fallen, those that are out come back first.
    """

    def __init__(self, limit: int | Callable[[], int]) -> None:
        self._limit: Callable[[], int] = limit if callable(limit) else lambda: limit
        self._taken = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    def locked(self) -> bool:
        """Whether ``acquire`` would have to wait."""
        return self._taken >= self._limit()

    async def acquire(self) -> Literal[True]:
        self._hand_on()
        if not self._waiters and not self.locked():
            self._taken += 1
            return True
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():  # it had been handed a slot
                self.release()
            raise
        return True

    def release(self) -> None:
        self._taken -= 1
        self._hand_on()

    def _hand_on(self) -> None:
        while self._waiters and not self.locked():
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._taken += 1
                waiter.set_result(None)

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *error: object) -> None:
        self.release()


async def gather_or_cancel(coros: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Gathers like ``asyncio.gather``, but the first failure cancels the others before it is raised."""
    tasks = [asyncio.ensure_future(coro) for coro in coros]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        await cancel_all(tasks)
        raise


async def cancel_all(tasks: Iterable["asyncio.Future[Any]"]) -> None:
    """Cancel tasks and wait until each has ended, whatever it ends with."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
