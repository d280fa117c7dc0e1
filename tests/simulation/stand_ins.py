"""What product code finds in place of ``threading``, ``time``, ``concurrent.futures`` and ``asyncio``."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError
from typing import Any

from tests.simulation.kernel import Killed, SimThread, Waiters, World

_LAST_STEPS = 50  # of a loop whose tasks have been cancelled


class Lock:
    """A lock, or with ``again`` one that its owner may take again."""

    def __init__(self, world: World, again: bool = False) -> None:
        self._world, self._again = world, again
        self._owner: SimThread | None = None
        self._depth = 0
        self._waiters: Waiters = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        world = self._world
        if self._again and self._owner is world.current:
            self._depth += 1
            return True
        world.hold_up()
        while self._owner is not None:
            if not blocking or not world.block("a lock", None if timeout < 0 else timeout, self._waiters):
                return False
        self._owner, self._depth = world.current, 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._world.wake_all(self._waiters)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class Condition:
    def __init__(self, world: World, lock: Lock | None = None) -> None:
        self._world, self._lock = world, lock or Lock(world, again=True)
        self._waiters: Waiters = deque()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        depth, self._lock._depth = self._lock._depth, 1
        self._lock.release()
        try:
            return self._world.block("a condition", timeout, self._waiters)
        finally:
            self._lock.acquire()
            self._lock._depth = depth

    def notify_all(self) -> None:
        self._world.wake_all(self._waiters)


class Event:
    def __init__(self, world: World) -> None:
        self._world, self._is_set = world, False
        self._waiters: Waiters = deque()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._world.wake_all(self._waiters)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            self._world.block("an event", timeout, self._waiters)
        return self._is_set


class Thread:
    def __init__(
        self,
        world: World,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
        name: str = "thread",
        daemon: bool = False,
    ) -> None:
        self._world, self._target, self._args, self.name = world, target, args, name
        self.ident: int | None = None
        self._ended = Event(world)

    def start(self) -> None:
        self.ident = 1
        self._world.spawn(self.name, self._run)
        self._world.hold_up()

    def _run(self) -> None:
        try:
            self._target(*self._args)
        finally:
            self._ended.set()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)


class Future:
    """One of ``concurrent.futures``."""

    def __init__(self, world: World) -> None:
        self._ended = Event(world)
        self._result: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Any], Any]] = []
        self._cancelled = False

    def done(self) -> bool:
        return self._ended.is_set()

    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> bool:
        if not self.done():
            self._cancelled = True
            self.set_exception(CancelledError())
        return self._cancelled

    def result(self, timeout: float | None = None) -> Any:
        if not self._ended.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self._ended.wait(timeout):
            raise TimeoutError
        return self._error

    def set_result(self, result: Any) -> None:
        if not self.done():
            self._result = result
            self._end()

    def set_exception(self, error: BaseException) -> None:
        if not self.done():
            self._error = error
            self._end()

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        if self.done():
            callback(self)
        else:
            self._callbacks.append(callback)

    def _end(self) -> None:
        self._ended.set()
        for callback in self._callbacks:
            callback(self)


class Pool:
    """A ThreadPoolExecutor."""

    def __init__(self, world: World, max_workers: int, thread_name_prefix: str = "pool") -> None:
        self._world, self._most, self._name = world, max_workers, thread_name_prefix
        self._waiting: deque[Callable[[], None]] = deque()
        self._running = 0
        self._idle: Waiters = deque()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future:
        future = Future(self._world)

        def work() -> None:
            try:
                result = function(*arguments)
            except Killed:
                raise
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._waiting.append(work)
        if self._running < self._most:
            self._running += 1
            self._world.spawn(self._name, self._work)
        self._world.hold_up()
        return future

    def _work(self) -> None:
        try:
            while self._waiting:
                self._waiting.popleft()()
        finally:
            self._running -= 1
            if not self._running:
                self._world.wake_all(self._idle)

    def map(self, function: Callable[..., Any], items: Iterable[Any]) -> Iterator[Any]:
        futures = [self.submit(function, item) for item in items]
        return (future.result() for future in futures)

    def shutdown(self, wait: bool = True) -> None:
        if wait and self._running:
            self._world.block(f"the end of {self._name}", None, self._idle)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()


class Selector:
    """Where an event loop waits when it has nothing to do."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiters: Waiters = deque()
        self._woken = False

    def select(self, timeout: float | None) -> list[Any]:
        if self._world.ending and self._world.is_over:
            self._world.now += timeout or 0.0
            return []
        if timeout == 0 or self._woken:
            self._world.yield_()
        else:
            self._world.block("something to do", timeout, self._waiters)
        self._woken = False
        return []

    def wake(self) -> None:
        self._woken = True
        self._world.wake_all(self._waiters)

    def close(self) -> None:
        return


class Loop(asyncio.BaseEventLoop):
    """asyncio's own event loop, on the world's clock."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world, self._selector = world, Selector(world)
        self._clock_resolution = 1e-9
        self.set_exception_handler(lambda loop, context: None)

    def time(self) -> float:
        return self._world.now

    def _process_events(self, events: Any) -> None:
        return

    def _write_to_self(self) -> None:
        self._selector.wake()


def run_coroutine_threadsafe(world: World, coro: Coroutine[Any, Any, Any], loop: Loop) -> Future:
    """Does what asyncio does, with a future of the world."""
    future = Future(world)

    def begin() -> None:
        task = asyncio.ensure_future(coro, loop=loop)
        task.add_done_callback(end)

    def end(task: "asyncio.Future[Any]") -> None:
        if task.cancelled():
            future.cancel()
        elif (error := task.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())

    loop.call_soon_threadsafe(begin)
    return future


class Module:
    """A module some names of which are others."""

    def __init__(self, real: Any, **names: Any) -> None:
        self._real = real
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class Modules:
    """The modules of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.time = Module(
            time,
            monotonic=self.monotonic,
            perf_counter=self.monotonic,
            time=self.monotonic,
            sleep=world.sleep,
        )
        self.threading = Module(
            threading,
            Lock=lambda: Lock(world),
            RLock=lambda: Lock(world, again=True),
            Condition=lambda lock=None: Condition(world, lock),
            Event=lambda: Event(world),
            Thread=lambda **options: Thread(world, **options),
        )
        self.asyncio = Module(
            asyncio, run_coroutine_threadsafe=lambda coro, loop: run_coroutine_threadsafe(world, coro, loop)
        )
        self._loop: Loop | None = None
        self._loops: list[Loop] = []

    def forget_loop(self) -> None:
        """The next process has one of its own."""
        self._loop = None

    def monotonic(self) -> float:
        """Reads the clock, which takes a moment: no two readings are the same."""
        self.world.now += 1e-6
        return self.world.now

    def pool(self, max_workers: int, thread_name_prefix: str = "pool") -> Pool:
        return Pool(self.world, max_workers, thread_name_prefix)

    def wait(self, futures: Iterable[Future]) -> Any:
        """``concurrent.futures.wait``, for all of them."""
        futures = list(futures)
        for future in futures:
            future.exception()
        return set(futures), set()

    def loop(self) -> Loop:
        """The event loop of the process that generates, which a thread runs."""
        if self._loop is None:
            self._loop = Loop(self.world)
            self._loops.append(self._loop)
            self.world.spawn("event loop", self._run_loop, process="manager loop")
        return self._loop

    def _run_loop(self) -> None:
        assert self._loop is not None
        self._loop.run_forever()

    def close(self) -> None:
        """Ends what is left of all loops, once no thread is; coroutines would complain when deleted."""
        for loop in self._loops:
            for _ in range(_LAST_STEPS):
                if not (left := asyncio.all_tasks(loop)):
                    break
                for task in left:
                    task.cancel()
                loop.call_soon(loop.stop)
                loop.run_forever()
            loop.close()
