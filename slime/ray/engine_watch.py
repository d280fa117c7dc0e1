"""Who of the fleet lives: one thread that has processes looked at and, while engines generate, HTTP checked.

watch = EngineWatch(models, WatchTimes(interval=30, timeout=30), tolerant=True)
watch.start()      # looks at processes, checks no health
watch.resume()     # while engines generate
watch.pause()      # before they are offloaded or updated: they need not answer then
watch.stop()

Looks and checks run side by side in threads of their own: one that hangs delays no other.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from slime.backends.sglang_utils.client import EngineError
from slime.backends.sglang_utils.router import RouterError
from slime.processes.silence import LONGEST_GAP_S, Silence
from slime.ray.engine import Engine, EngineState
from slime.ray.served_model import ServedModel

logger = logging.getLogger(__name__)

LOOK_INTERVAL = 2.0  # seconds between two looks at every process of the fleet
_MAX_THREADS = 256


class EngineFailure(RuntimeError):
    """An engine or the router ended while the run needed it."""


@dataclass(frozen=True)
class WatchTimes:
    """The times of the health checks, in seconds.

    Attributes:
        interval: between two checks of an engine.
        timeout: that a check may take.
        first_wait: between a resume and the first check, for engines that are slow to wake.
        hang: without a healthy answer, after which an engine ends a run that tolerates no deaths.
    """

    interval: float
    timeout: float
    first_wait: float = 0.0
    hang: float = math.inf


class EngineWatch:
    """Finds dead engines, once each, and deals with them.

    If deaths are tolerated, one failed health check is a death; a dead engine leaves the router and is ended,
    and may then be replaced. If not, or if a model that is to generate has no engine left, the death is kept
    as the failure that ``check`` raises, and so is the end of a router that may not be started again. Where
    no death is tolerated, but that of one that joins and has not served yet, an engine is as good as dead if
    it has given no healthy answer for long.

    Args:
        on_gone: told of each engine that has died, left its router and ended.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        times: WatchTimes,
        *,
        tolerant: bool,
        on_gone: Callable[[ServedModel, Engine], None] = lambda model, engine: None,
    ) -> None:
        self._models, self._times, self._tolerant, self._on_gone = models, times, tolerant, on_gone
        self._silences: dict[Engine, Silence] = {}  # since the last healthy answer of each
        self._failure: EngineFailure | None = None
        self._changed = threading.Condition(threading.RLock())
        self._stopped = False
        self._resumes = 0
        self._look_due, self._check_due = time.monotonic(), math.inf  # inf: paused
        self._looking: set[object] = set()
        self._checking: set[object] = set()
        self._pool = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="engine-look")
        self._thread = threading.Thread(
            target=self._guarded, args=(self._run,), name="engine-watch", daemon=True
        )

    def start(self) -> None:
        self._look_due = time.monotonic() + LOOK_INTERVAL
        self._thread.start()

    def resume(self) -> None:
        """Begins to check health."""
        with self._changed:
            if self._check_due == math.inf:
                self._resumes += 1
                self._checking = set()
                self._silences = {}
                self._check_due = time.monotonic() + self._times.first_wait
                self._changed.notify_all()

    def pause(self) -> None:
        """Pauses the checks: on return none finds an engine dead any more, until the next resume.

        A check that is under way is not waited for; its result is ignored.
        """
        with self._changed:
            self._check_due = math.inf

    def stop(self) -> None:
        """Stops the checks: on return none finds anything any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
        self._pool.shutdown(wait=False)

    def check(self) -> None:
        """Raises what has been found to end the run, if anything."""
        if self._failure is not None:
            raise self._failure

    def fail(self, message: str) -> None:
        """Ends the run with this message, unless something else has ended it."""
        with self._changed:
            if not self._stopped:
                self._failure = self._failure or EngineFailure(message)

    def look(self) -> None:
        """Looks at every living engine now, and returns when that is done."""
        wait(
            [
                self._pool.submit(self._guarded, self._look_at, model, engine)
                for model in self._models
                for engine in model.living
            ]
        )

    def probe(self) -> None:
        """Asks every living engine, in whatever state an update has left it; returns when that is done.

        One that gives no answer is dead.
        """
        wait(
            [
                self._pool.submit(self._guarded, self._probe, model, engine)
                for model in self._models
                for engine in model.living
            ]
        )

    def examine(self, model: ServedModel, engine: Engine) -> None:
        """Looks at one engine and asks it: it is dead if it has ended or gives no answer."""
        self._guarded(self._look_at, model, engine)
        if engine.lives:
            self._guarded(self._probe, model, engine)

    def declare_dead(
        self, model: ServedModel, engine: Engine, reason: str, resumes: int | None = None
    ) -> None:
        """Deals with a death, unless that has been done or nobody wants to know any more.

        Args:
            resumes: the number of the resume that a health check followed.
        """
        message = f"{engine} ended: {reason}"
        with self._changed:
            if self._stopped or self._is_outdated(resumes) or not engine.become(EngineState.DEAD, reason):
                return
            if not self._tolerant and not engine.joins:
                self.fail(message)
                return
            if self._check_due < math.inf and model.is_lost:
                self.fail(f"{message}; no engine is left")
        # From here on it is this thread's alone; what follows asks the router and Ray.
        logger.warning("%s; %s", message, _what_follows(model, engine))
        try:
            model.dismiss(engine)
        except RouterError as error:
            self.fail(f"{message}; the router keeps it: {error}")
        finally:
            engine.end()
        self._on_gone(model, engine)

    def _run(self) -> None:
        with self._changed:
            while not self._stopped:
                now = time.monotonic()
                if now >= self._look_due:
                    self._look_due = now + LOOK_INTERVAL
                    self._begin_looks()
                if now >= self._check_due:
                    self._check_due = now + self._times.interval
                    self._begin_checks()
                self._changed.wait(min(self._look_due, self._check_due) - now)

    def _begin_looks(self) -> None:
        for model in self._models:
            self._begin(self._looking, model, self._look_at_router, model)
            if model.unlisted:
                self._begin(self._looking, model.list_missing, self._complete, model)
            for engine in model.living:
                self._begin(self._looking, engine, self._look_at, model, engine)

    def _begin_checks(self) -> None:
        for model in self._models:
            for engine in model.living:
                self._begin(self._checking, engine, self._check_health, model, engine, self._resumes)

    def _begin(
        self, under_way: set[object], subject: object, task: Callable[..., None], *arguments: Any
    ) -> None:
        """Runs a task in a thread of its own, unless the last one for this subject is still under way."""
        if subject not in under_way:
            under_way.add(subject)
            future = self._pool.submit(self._guarded, task, *arguments)
            future.add_done_callback(lambda _: under_way.discard(subject))

    def _guarded(self, task: Callable[..., None], *arguments: Any) -> None:
        try:
            task(*arguments)
        except Exception as error:  # whatever it is: engines would go unwatched from here on
            logger.exception("the engine watcher failed")
            self.fail(f"the engine watcher failed: {type(error).__name__}: {error}")

    def _look_at_router(self, model: ServedModel) -> None:
        router = model.router
        if router is None or router.failure_reason() is None:
            return
        try:
            model.restart_router(router)
        except RouterError as error:
            self.fail(f"the router ended: {error}")

    def _complete(self, model: ServedModel) -> None:
        """Has a new router told of engines that hung when it started, if they answer by now."""
        try:
            model.list_missing()
        except RouterError as error:  # if it has ended that is found by whoever looks at it
            logger.warning("the router of model %s is told again later: %s", model.name, error)

    def _look_at(self, model: ServedModel, engine: Engine) -> None:
        reason = engine.handle.failure_reason()
        if reason is not None:
            self.declare_dead(model, engine, reason)

    def _check_health(self, model: ServedModel, engine: Engine, resumes: int) -> None:
        began, gap = time.monotonic(), self._times.interval + LONGEST_GAP_S
        silence = self._silences.setdefault(engine, Silence(gap))
        reason = self._sickness(engine)
        engine.place.ailment = reason or ""
        if reason is None:
            silence.end()
            return
        if not self._tolerant:
            silent = silence.seconds(began)
            if silent < self._times.hang:
                return
            reason = (
                f"hangs, {silent:.0f} s without a healthy answer (--rollout-engine-hang-timeout): {reason}"
            )
        self.declare_dead(model, engine, reason, resumes)

    def _probe(self, model: ServedModel, engine: Engine) -> None:
        """Asks what the scheduler answers, which needs neither a cache nor whole weights."""
        timeout = self._times.timeout
        try:
            engine.client.request("GET", "/server_info", timeout=timeout)
        except EngineError as error:
            if error.status is None:
                reason = f"no answer within {timeout:g} s, in or after a weight update"
                self.declare_dead(model, engine, reason)

    def _sickness(self, engine: Engine) -> str | None:
        timeout = self._times.timeout
        try:
            return None if engine.client.health(timeout) else f"no healthy answer within {timeout:g} s"
        except Exception as error:  # whatever goes wrong with a check is the finding, not a fault of ours
            return f"{type(error).__name__}: {error}"

    def _is_outdated(self, resumes: int | None) -> bool:
        """Whether health checks were paused or resumed since the ``resumes``-th resume."""
        return resumes is not None and (self._check_due == math.inf or self._resumes != resumes)


def _what_follows(model: ServedModel, engine: Engine) -> str:
    if engine.joins:
        return "it had not served yet, and does not join the run"
    if model.restarts_alone(engine):
        return "it is replaced now"
    return "it is replaced before the next weight update, if it can be"
