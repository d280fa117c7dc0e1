"""Engines that join and leave by how much there is to answer, within bounds (``--rollout-queue-per-engine``).

While engines generate, the requests that they hold, running and waiting, are counted every few seconds: in
rollouts, and between them too where a worker goes on then. Else engines are idle because the trainer works,
and the next rollout waits for all of them. Once the counts fill an interval, their mean says for how many
engines there is enough to do, each with as many requests as the flag says. Nothing changes as long as each
has half to one and a half times as many. Whoever comes or goes brings the others close to what they should
have: the next decision does not take it back.
"""

import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from slime.backends.sglang_utils.client import EngineError
from slime.config.engines import CROWDED, EngineConfig
from slime.ray.engine import Engine, EngineState, MembershipError
from slime.ray.engine_requests import requests_of
from slime.ray.membership import Membership
from slime.ray.served_model import ServedModel
from slime.utils.background_generation import background_generation
from slime.utils.notes import note
from slime.utils.weight_clock import clock

logger = logging.getLogger(__name__)

LOOK_S = 5.0
"""Seconds between two counts."""
IDLE = 0.5
"""Times the requests that an engine should have, below which one goes."""
_DRAIN_S = 60.0
"""Seconds in which one that leaves may answer what it has."""


@dataclass(frozen=True)
class Bounds:
    """What the flags say.

    Attributes:
        least: engines at least, and ``most`` at most.
        queue: requests that each should have.
    """

    least: int
    most: int
    queue: float


def wanted(bounds: Bounds, engines: int, requests: float) -> int:
    """How many engines there should be.

    Args:
        engines: that there are, or are about to be.
        requests: that all of them hold.
    """
    enough = math.ceil(requests / bounds.queue)
    few = requests > CROWDED * bounds.queue * engines
    # Fewer engines must not be crowded by what these have.
    many = requests < IDLE * bounds.queue * engines and enough < engines
    if not few and not many:
        return engines
    allowed = min(max(enough, bounds.least), bounds.most)
    # What the bounds forbid is no reason to go the other way: somebody has asked for that by hand.
    return max(allowed, engines) if few else min(allowed, engines)


class EngineScaling:
    """Has engines of the first model join and leave, as `slime engines` does.

    Without ``--rollout-queue-per-engine``, or without a model, it does nothing.
    """

    def __init__(self, config: EngineConfig, models: Sequence[ServedModel], membership: Membership) -> None:
        self._models, self._membership = models[:1], membership
        self._queue = config.rollout_queue_per_engine
        self._least, self._most = config.rollout_min_engines or 1, config.rollout_max_engines
        self._counts: list[int] = []
        self._left = LOOK_S  # seconds of generation until the next count
        self._looks = max(1, math.ceil(config.rollout_scaling_interval / LOOK_S))
        self._changing = threading.Lock()
        self._blocks, self._over = 0, threading.Event()  # of the thread that counts
        self._over.set()

    @contextmanager
    def while_generating(self) -> Iterator[None]:
        """Counts, and decides, during the block; counts of a block before it are gone on with.

        Also after it, until the next one, if answers are made then.
        """
        if self._queue is None or not self._models:
            yield
            return
        over = self._begin()
        try:
            yield
        finally:
            self._end(over)

    def stop(self) -> None:
        """Counts no more, until the next block."""
        with self._changing:
            self._over.set()

    def _begin(self) -> threading.Event:
        """Has a thread count, if none does; returns what ends it."""
        with self._changing:
            self._blocks += 1
            if self._over.is_set():
                over = self._over = threading.Event()
                threading.Thread(target=self._watch, args=(over,), name="engine-scaling", daemon=True).start()
            return self._over

    def _end(self, over: threading.Event) -> None:
        with self._changing:
            self._blocks -= 1
            if not self._generates:
                over.set()

    @property
    def _generates(self) -> bool:
        return self._blocks > 0 or background_generation.goes_on

    def _watch(self, over: threading.Event) -> None:
        while True:
            began = time.monotonic()
            if over.wait(self._left):
                # The next block goes on with it: rollouts may all be shorter than that.
                self._left = max(0.0, self._left - (time.monotonic() - began))
                return
            self._left = LOOK_S
            if self._has_ended(over):
                return
            try:
                self.look(over)
            except Exception:  # whatever it is: the run goes on with the engines that it has
                logger.exception("engines do not join or leave by their requests at the moment")

    def _has_ended(self, over: threading.Event) -> bool:
        """Whether who went on between rollouts does so no more."""
        with self._changing:
            if not self._generates:
                over.set()
            return over.is_set()

    def look(self, over: threading.Event) -> None:
        """Counts once, and decides if that fills the interval, unless generation is over by then."""
        # Engines that stand still for new weights may hold nothing for it.
        count = None if over.is_set() or clock.updating else self._count()
        if count is None or over.is_set() or clock.updating:
            return
        self._counts.append(count)
        if len(self._counts) >= self._looks:
            mean, self._counts = sum(self._counts) / len(self._counts), []
            self._decide(mean)

    def _count(self) -> int | None:
        """The requests of all engines that serve; None where one does not say."""
        try:
            return sum(requests_of(engine) for engine in self._serving())
        except EngineError:
            return None

    def _serving(self) -> list[Engine]:
        return [engine for engine in self._models[0].engines if engine.state is EngineState.SERVING]

    def _decide(self, requests: float) -> None:
        model = self._models[0]
        # The dead are among them: others take their places.
        staying = [engine for engine in model.engines if engine.state is not EngineState.DRAINING]
        there = len(staying) + len(model.joiners)
        free = model.free_ranks()
        most = there + len(free) if self._most is None else self._most
        assert self._queue is not None
        change = wanted(Bounds(self._least, most, self._queue), there, requests) - there
        try:
            if change > 0 and free:
                joining = self._membership.add(min(change, len(free)), model.name)
                note(f"{_told(requests)} of {there} engines: {joining} join")
            elif change < 0 and not model.joiners:
                leaving = [engine.rank for engine in self._serving()[change:]]
                self._membership.drain(leaving, _DRAIN_S)
                note(f"{_told(requests)} of {there} engines: {leaving} leave")
        except MembershipError as error:  # somebody else has had others leave, or some have died
            note(f"{_told(requests)} of {there} engines, which stay: {error}")


def _told(requests: float) -> str:
    return f"--rollout-queue-per-engine: {requests:.1f} requests"
