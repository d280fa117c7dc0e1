"""The engine thread: it alone touches the scheduler, the weights and the cache.

Others hand it sequences and commands; commands run between two steps.
"""

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.scheduler import Scheduler
from slime.backends.embedded_engine.sequence import Sequence, abort_reason
from slime.backends.embedded_engine.serving_model import SequenceCache
from slime.backends.embedded_engine.weights_fence import WeightsFence, writer

logger = logging.getLogger(__name__)
T = TypeVar("T")

PAUSE_MODES = ("abort", "retract", "in_place")


@dataclass
class Command:
    """``exclusive`` ones wait, unless the engine rests, until nothing runs. ``writer`` wants it, if any."""

    function: Callable[[], Any]
    exclusive: bool
    future: "asyncio.Future[Any]"
    writer: str | None = None


class Engine:
    def __init__(self, scheduler: Scheduler, cache: SequenceCache) -> None:
        self.scheduler = scheduler
        self.cache = cache
        self.paused: str | None = None
        self.behind_pause: list[Sequence] = []
        """Arrived during the pause; the scheduler learns of them when it ends, as in SGLang."""
        self.updating = False
        """A weight update is open: half of the weights may be new, so nothing may be computed."""
        self.fence = WeightsFence()
        self.released: set[str] = set()
        """Tags of memory that was given back: nothing can run without it."""
        self.last_step_throughput = 0.0
        self._incoming: deque[Sequence | Command] = deque()
        self._held: deque[Command] = deque()
        self._wakeup = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run_or_die, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        with self._wakeup:
            self._stopping = True
            self._wakeup.notify()
        self._thread.join(timeout=10)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, sequences: list[Sequence]) -> None:
        with self._wakeup:
            self._incoming.extend(sequences)
            self._wakeup.notify()

    def run(self, function: Callable[[], T], exclusive: bool = False) -> "asyncio.Future[T]":
        """Runs a function on the engine thread; the future carries its result or its error."""
        future = asyncio.get_running_loop().create_future()
        command = Command(function, exclusive, future, writer.get())
        with self._wakeup:
            self._incoming.append(command)
            self._wakeup.notify()
        return command.future

    def pause(self, mode: str) -> None:
        if mode not in PAUSE_MODES:
            raise BadRequest(f"mode {mode!r}: wanted one of {', '.join(PAUSE_MODES)}", kind=BadRequest.BODY)
        self.fence.pause()
        self.paused = mode
        if mode == "abort":
            self.scheduler.abort(self.scheduler.live)
        elif mode == "retract":
            self.scheduler.retract()

    def resume(self) -> None:
        """
        Raises:
            BadRequest: a trainer has paused it, and none asks for this.
        """
        self.fence.resume()
        self.paused = None
        self.scheduler.enqueue(s for s in self.behind_pause if not s.finished)
        self.behind_pause = []

    def flush(self) -> bool:
        """Empties the cache; refused (False) while a sequence runs or waits to run.

        What waits for the end of a pause holds nothing in the cache.
        """
        queued = bool(self.scheduler.waiting) and self.paused not in ("retract", "abort")
        if self.scheduler.computing or queued:
            return False
        self.cache.clear()
        return True

    def abort(self, rid: str, everything: bool) -> None:
        """Aborts everything, or the request with this id and, as SGLang does, those whose ids begin so.

        An id that no request has does nothing; those behind a pause count.
        """
        live = self._live
        if everything or any(s.rid == rid for s in live):
            self._abort([s for s in live if everything or s.rid.startswith(rid)])

    @property
    def _live(self) -> list[Sequence]:
        return [*self.scheduler.live, *self.behind_pause]

    def _abort(self, sequences: list[Sequence], reason: dict[str, Any] | None = None) -> None:
        self.behind_pause = [s for s in self.behind_pause if s not in sequences]
        self.scheduler.abort(sequences, reason)

    def abort_to_shut_down(self) -> None:
        """Ends everything with an error that says so."""
        self._abort(self._live, abort_reason("the server is shutting down", 503))

    def _run_or_die(self) -> None:
        """Runs the engine's thread; its failure ends the process, for the server is of no use without it."""
        try:
            self._run()
        except BaseException:
            logger.critical("the engine thread failed", exc_info=True)
            os._exit(1)

    @torch.inference_mode()
    def _run(self) -> None:
        while self._take_incoming():
            self._run_held()
            if self._can_step():
                self._step()
            self._publish()
        self.abort_to_shut_down()
        self._publish()

    def _take_incoming(self) -> bool:
        """Waits until there is something to do; False when the engine is to stop."""
        with self._wakeup:
            while not (self._incoming or self._stopping or self._can_step() or self._held_ready()):
                self._wakeup.wait()
            incoming = list(self._incoming)
            self._incoming.clear()
        for item in incoming:
            if isinstance(item, Sequence) and self.paused:
                self.behind_pause.append(item)
            elif isinstance(item, Sequence):
                self.scheduler.enqueue([item])
            elif item.exclusive:
                self._held.append(item)
            else:
                self._execute(item)
        return not self._stopping

    def _can_step(self) -> bool:
        if self._resting or self.released:
            return False
        return bool(self.scheduler.computing) or (bool(self.scheduler.waiting) and not self._held)

    def _held_ready(self) -> bool:
        return bool(self._held) and (self._resting or not self.scheduler.computing)

    @property
    def _resting(self) -> bool:
        return self.paused is not None or self.updating

    def _run_held(self) -> None:
        while self._held_ready():
            self._execute(self._held.popleft())

    def _execute(self, command: Command) -> None:
        try:
            self.fence.admit(command.writer)
            result = command.function()
        except Exception as error:  # handed to whoever awaits the command
            command.future.get_loop().call_soon_threadsafe(_reject, command.future, error)
        else:
            command.future.get_loop().call_soon_threadsafe(_resolve, command.future, result)

    def _step(self) -> None:
        before, started = self.scheduler.generated_tokens, time.perf_counter()
        try:
            self.scheduler.step(admit=not self._held)
        except Exception as error:
            logger.exception("a step of the engine failed")
            reason = abort_reason(f"engine step failed: {error!r}", 500, "InternalServerError")
            self.scheduler.drop_all(reason)
            self.cache.clear()
        elapsed = time.perf_counter() - started
        self.last_step_throughput = (self.scheduler.generated_tokens - before) / max(elapsed, 1e-9)

    def _publish(self) -> None:
        """Tells the owners of sequences that moved on, in one call into the event loop."""
        touched, self.scheduler.touched = self.scheduler.touched, []
        if touched and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_notify, touched)


def _notify(sequences: list[Sequence]) -> None:
    for sequence in sequences:
        callback = sequence.on_finish if sequence.finished else sequence.on_progress
        if callback is not None:
            callback()


def _resolve(future: "asyncio.Future[Any]", result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _reject(future: "asyncio.Future[Any]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
