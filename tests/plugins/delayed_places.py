"""Where random delays wait: what of the standard library lets threads, tasks and processes meet."""

import asyncio
import concurrent.futures
import functools
import multiprocessing.process
import os
import queue
import subprocess
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.plugins.random_delays import Delays

_AROUND: tuple[tuple[Any, str], ...] = (  # a wait before and one after
    *((threading.Thread, "start"), (threading.Event, "set"), (threading.Event, "wait")),
    *((threading.Condition, "wait"), (queue.Queue, "put"), (queue.Queue, "get")),
    *((concurrent.futures.ThreadPoolExecutor, "submit"), (concurrent.futures.Future, "set_result")),
    *((subprocess.Popen, "__init__"), (subprocess.Popen, "poll"), (subprocess.Popen, "wait")),
    (multiprocessing.process.BaseProcess, "start"),
)
_BEFORE: tuple[tuple[Any, str], ...] = (
    *((threading.Thread, "run"), (multiprocessing.process.BaseProcess, "run")),
    *((asyncio.BaseEventLoop, "_run_once"), (asyncio.BaseEventLoop, "call_soon_threadsafe")),
)
# Not after: one that is cancelled then has put or got nothing.
_BEFORE_ASYNC: tuple[tuple[Any, str], ...] = (
    *((asyncio.Queue, "put"), (asyncio.Queue, "get"), (asyncio.Event, "wait"), (asyncio.Lock, "acquire")),
    *((asyncio.Semaphore, "acquire"), (asyncio.Condition, "wait"), (asyncio, "sleep")),
)
_asyncio_sleep = asyncio.sleep


def patch(delays: "Delays") -> None:
    """Makes each of the places wait."""
    for owner, name in _AROUND:
        setattr(owner, name, _around(delays, f"{owner.__name__}.{name}", getattr(owner, name)))
    for owner, name in _BEFORE:
        setattr(owner, name, _before(delays, f"{owner.__name__}.{name}", getattr(owner, name)))
    for owner, name in _BEFORE_ASYNC:
        place = f"asyncio.{owner.__name__}.{name}"
        setattr(owner, name, _before_async(delays, place, getattr(owner, name)))
    threading.Lock = functools.partial(_Lock, delays, threading.Lock)  # type: ignore[assignment, misc]


def _around(delays: "Delays", place: str, original: Callable[..., Any]) -> Callable[..., Any]:
    starts_process = place == "Popen.__init__"

    @functools.wraps(original)
    def delayed(*args: Any, **kwargs: Any) -> Any:
        if starts_process:
            os.environ["SLIME_RANDOM_DELAYS"] = delays.child()
        delays.wait(place)
        result = original(*args, **kwargs)
        delays.wait(place)
        return result

    return delayed


def _before(delays: "Delays", place: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def delayed(*args: Any, **kwargs: Any) -> Any:
        delays.wait(place)
        return original(*args, **kwargs)

    return delayed


def _before_async(delays: "Delays", place: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def delayed(*args: Any, **kwargs: Any) -> Any:
        if seconds := delays.draw(place):
            await _asyncio_sleep(seconds)
        return await original(*args, **kwargs)

    return delayed


class _Lock:
    """A lock that is got and given back late."""

    __slots__ = ("__weakref__", "_delays", "_lock")

    def __init__(self, delays: "Delays", make: Callable[[], Any]) -> None:
        self._delays, self._lock = delays, make()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._delays.wait("Lock.acquire")
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        self._lock.release()
        self._delays.wait("Lock.release")

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


_Lock.__module__, _Lock.__qualname__, _Lock.__name__ = "_thread", "lock", "lock"  # messages name the type
