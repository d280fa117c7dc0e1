"""Where environments run: in threads of this process, or in processes that can be killed.

A thread shares everything with the rollout, and cannot be ended: what hangs in it stays there. A process is
one of `slime.rollout.rm_hub.grading_pool`: what loops, takes all memory or exits there costs its episode and
nothing else; and it has no network and no keys.
"""

import asyncio
import atexit
import inspect
import queue
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple, Protocol

from slime.environments.hosted import ACT
from slime.environments.protocol import Answer, Environment, Step, checked_step, messages_of, tools_of
from slime.rollout.base_types import GradingFailed, RolloutError
from slime.rollout.rm_hub.grading_pool import GradingProcess, LabelAtFault
from slime.utils.async_utils import Slots

Task = Mapping[str, Any]
# Importing and making one may take longer than a step of it.
_START_LIMIT_S = 120.0
# For a call that was under way when its process was killed.
_CLOSING_S = 5.0


class EnvironmentFailed(GradingFailed):
    """An environment hung, raised or died in an episode, of which nothing is known now."""


class Opening(NamedTuple):
    """How an episode begins."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]


class Episode(Protocol):
    """An episode that is being played. Whatever fails in it raises `EnvironmentFailed`."""

    async def begin(self, task: Task, seed: int) -> Opening:
        """Begins it. Raises RolloutError if there is no such environment, whatever the task."""

    async def step(self, answer: Answer) -> Step:
        """What comes of a turn of the model."""


class Hosts(Protocol):
    """Gives each episode a place; ``async with hosts.episode(args) as episode``."""

    def episode(self, args: Any) -> AbstractAsyncContextManager[Episode]:
        """Waits for a place, and leaves it at the end of the block.

        Args:
            args: of the run.
        """


class Threads:
    """Each episode has a thread, in which its plain methods run; asynchronous ones run on the caller's loop.

    Args:
        make: makes an environment; is given the run's args.
        name: its name, for messages.
        limit_s: seconds for each call.
    """

    def __init__(self, make: Callable[[Any], Environment], name: str, limit_s: float) -> None:
        self._make, self._name, self._limit_s = make, name, limit_s

    @asynccontextmanager
    async def episode(self, args: Any) -> AsyncIterator[Episode]:
        played = _ThreadEpisode(partial(self._make, args), self._name, self._limit_s)
        try:
            yield played
        finally:
            await played.end()


class _ThreadEpisode:
    def __init__(self, make: Callable[[], Environment], name: str, limit_s: float) -> None:
        self._make, self._name, self._limit_s = make, name, limit_s
        self._thread = SerialThread("slime-environment")
        self._environment: Any = None
        self._answers = True

    async def begin(self, task: Task, seed: int) -> Opening:
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                self._environment = await self._thread.call(self._make)
        except Exception as error:  # a constructor of the user's, which may raise anything
            raise RolloutError(f"environment {self._name}: {type(error).__name__}: {error}") from error
        return await self._within(self._begun, task, seed)

    async def _begun(self, task: Task, seed: int) -> Opening:
        observation = await self._call(self._environment.reset, task, seed)
        return Opening(messages_of(observation), tools_of(self._environment))

    async def step(self, answer: Answer) -> Step:
        return await self._within(self._stepped, answer)

    async def _stepped(self, answer: Answer) -> Step:
        return checked_step(await self._call(self._environment.step, answer))

    async def end(self) -> None:
        """Closes the environment, unless a call of it still hangs."""
        close = getattr(self._environment, "close", None)
        try:
            if close is not None and self._answers:
                await self._within(self._call, close)
        finally:
            self._thread.close()

    async def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        if inspect.iscoroutinefunction(method):
            return await method(*args)
        result = await self._thread.call(method, *args)
        return await result if inspect.isawaitable(result) else result

    async def _within(self, call: Callable[..., Any], *args: Any) -> Any:
        """Calls, within the limit.

        Raises:
            EnvironmentFailed: it raised, or its time was up.
        """
        try:
            async with asyncio.timeout(self._limit_s) as limit:
                return await call(*args)
        except asyncio.CancelledError:
            self._answers = False
            raise
        except RolloutError:  # its way to say that no episode can be played here
            raise
        except (Exception, SystemExit) as error:
            what = f"{type(error).__name__}: {error}"
            if isinstance(error, TimeoutError) and limit.expired():
                self._answers, what = False, f"no answer within {self._limit_s:g} s"
            raise EnvironmentFailed(f"environment {self._name}: {what}") from error


class Processes:
    """Each episode has a process, of so many at most; others wait. A process is used for one after another.

    Args:
        path: of the class, dotted; it is imported there, and not here.
        options: what its constructor is given by name, as JSON.
        limit_s: seconds for each call.
    """

    def __init__(self, path: str, options: Mapping[str, Any], most: int, limit_s: float) -> None:
        self._path, self._options, self._limit_s = path, options, limit_s
        self._slots, self._servers, self._idle = Slots(most), list[_Server](), list[_Server]()
        atexit.register(self.close)

    @asynccontextmanager
    async def episode(self, args: Any) -> AsyncIterator[Episode]:
        async with self._slots:
            server = self._idle.pop() if self._idle else self._started()
            played = _ProcessEpisode(server, self._path, self._options)
            try:
                yield played
            except BaseException:
                server.thread.submit(server.process.stop)  # once what it is asked now has had its time
                raise
            else:
                server.thread.submit(server.end_episode)
            finally:
                self._idle.append(server)

    def _started(self) -> "_Server":
        self._servers.append(_Server(self._limit_s))
        return self._servers[-1]

    @property
    def pids(self) -> list[int]:
        """The process ids of those that there are."""
        return [server.process.pid for server in self._servers if server.process.pid is not None]

    def close(self) -> None:
        """Kills the processes."""
        for server in self._servers:
            server.close()


class _Server:
    """A process, and the thread that asks it, one thing after another."""

    def __init__(self, limit_s: float) -> None:
        self.process, self.thread = GradingProcess(limit_s), SerialThread("slime-environments")
        self._is_closed = False

    def close(self) -> None:
        """Kills the process; what the thread is about to ask is not to start another one."""
        self._is_closed = True
        self.process.stop()
        with suppress(FutureTimeout):
            self.thread.submit(self.process.stop).result(_CLOSING_S)

    def end_episode(self) -> None:
        if self._is_closed or self.process.pid is None:
            return  # asked for the end, it would start anew
        try:
            self.process.call(ACT, "end", once=True)
        except GradingFailed:
            self.process.stop()


class _ProcessEpisode:
    def __init__(self, server: _Server, path: str, options: Mapping[str, Any]) -> None:
        self._server, self._path, self._options = server, path, options

    async def begin(self, task: Task, seed: int) -> Opening:
        await self._server.thread.call(self._server.process.load, self._path)
        found = await self._ask("begin", self._path, self._options, task, seed)
        if "unmade" in found:
            raise RolloutError(f"environment {self._path}: {found['unmade']}")
        return Opening(**found)

    async def step(self, answer: Answer) -> Step:
        return Step(**await self._ask("step", asdict(answer)))

    async def _ask(self, name: str, *args: Any) -> Any:
        ask = partial(self._server.process.call, ACT, name, *args)
        try:
            return await self._server.thread.call(partial(ask, once=name != "begin"))
        except (GradingFailed, LabelAtFault) as failure:
            raise EnvironmentFailed(f"environment {self._path}: {failure}") from failure


class SerialThread:
    """A thread that calls one function after another. A daemon: what hangs in it keeps no process alive."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, function: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Calls it after all that was asked for before."""
        done = Future[Any]()
        self._jobs.put((done, partial(function, *args)))
        return done

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """What the function returns, or raises."""
        return await asyncio.wrap_future(self.submit(function, *args))

    def close(self) -> None:
        """Ends it after all that was asked for."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            done, function = job
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(function())
            except StopIteration as error:  # of a bare next(): no coroutine can be told of it
                done.set_exception(RuntimeError(f"StopIteration: {error}"))
            except BaseException as error:  # whoever asked is told, whatever it is
                done.set_exception(error)
