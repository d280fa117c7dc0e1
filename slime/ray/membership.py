"""Engines that leave a fleet, and others that join it, while its run goes on."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from slime.backends.sglang_utils.router import RouterError
from slime.ray.engine import Engine, EngineState, MembershipError
from slime.ray.engine_requests import requests_held
from slime.ray.engine_rows import EngineRow, rows_of
from slime.ray.engine_starts import START_ERRORS
from slime.ray.members import Members
from slime.ray.membership_checks import (
    engine_of,
    model_named,
    places_for,
    require_drainable,
    require_others,
)
from slime.ray.metrics_pages import MetricsPage, pages_of
from slime.ray.served_model import ServedModel

logger = logging.getLogger(__name__)

END_TIMEOUT = 180.0  # seconds for an engine that an update cannot wait for to end
_STOP_TIMEOUT = 30.0  # seconds for those that are ending when the fleet stops
_LOOK_AGAIN = 0.5  # seconds between two looks at what an engine still has to answer
_BEFORE_NOTICE = 10.0  # seconds before its place is taken away that an engine is ended
_IDLE_LOOKS = 2  # in a row: a request may be on its way from the router


class Membership:
    """Who belongs to the fleet, where that changes by request.

    A weight update has the same engines from its beginning to its end: whoever is to leave meanwhile does so
    after it, and an engine that still answers requests when one begins is ended at once, as its weights would
    become too old. Its requests are then computed anew elsewhere, as those of one that has died.

    An engine that joins starts beside the others, which know nothing of it until a weight update begins: that
    update is its first, and it serves after it. Where engines take no updates it serves as soon as it can.

    Args:
        models: by name.
        refusal: why nobody may leave or join; empty if they may.
        start_timeout: seconds for an engine that joins to start.
        silence: seconds without an answer after which one that leaves is not waited for any more.
        former: who belonged to the fleet in whose place this one is; None where it is the first.
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        refusal: str = "",
        *,
        start_timeout: float = 600.0,
        silence: float = 30.0,
        former: Members | None = None,
    ) -> None:
        self._models, self._refusal = models, refusal
        self._start_timeout, self._silence = start_timeout, silence
        self._changed = threading.Condition(threading.RLock())
        self._updating = self._stopped = False
        self._to_drain: dict[int, float] = {}  # by rank, seconds for its requests; after the update
        self._former = former or Members(0, frozenset(), frozenset(), {})
        self._is_first, self._told = former is None, self._former.number
        self._starts_again = former is not None
        now = time.monotonic()
        # By rank, when its place may be filled again.
        self._notices = {rank: now + seconds for rank, seconds in self._former.notices.items()}
        self._draining: set[Engine] = set()

    def launch(self) -> None:
        """Begins to start the engines of all models, and those that join, then the routers."""
        with self._changed:
            self._forget_notices()
        for model in self._models.values():
            model.launch(None if self._is_first else self._former.places)
        for model in self._models.values():
            free = set(model.free_ranks())
            self._begin_joins(model, sorted(self._former.joining & free))
        self._starts_again = False

    def ask(self, method: str, *arguments: Any) -> tuple[Any, Members]:
        """What a method of it answers, and who belongs to the fleet from then on."""
        with self._changed:
            return getattr(self, method)(*arguments), self.members()

    def members(self) -> Members:
        """Who is to belong to the fleet, should another one take its place."""
        with self._changed:
            self._forget_notices()
            self._told += 1
            now, leaving = time.monotonic(), {*self._to_drain, *self._notices}
            engines = [engine for model in self._models.values() for engine in model.engines]
            joiners = [engine for model in self._models.values() for engine in model.joiners]
            stay = {e.rank for e in engines if not e.joins and e.state is not EngineState.DRAINING}
            join = {e.rank for e in (*engines, *joiners) if e.joins and e.state is not EngineState.DEAD}
            notices = {rank: end - now for rank, end in self._notices.items()}
            return Members(self._told, frozenset(stay - leaving), frozenset(join - leaving), notices)

    def rows(self) -> list[EngineRow]:
        """All engines and free places, by rank."""
        self._forget_notices()
        return rows_of(self._models.values(), self._to_drain)

    def metrics_pages(self) -> list[MetricsPage]:
        """Where engines and routers show their metrics."""
        return pages_of(self._models.values())

    def drain(self, ranks: Sequence[int], seconds: float, notice: float = 0.0) -> None:
        """Has engines leave: begins that and returns.

        Args:
            seconds: for what each still has to answer; then it is ended, and others answer that.
            notice: seconds until the places are taken away: each ends before, and none starts there until it.

        Raises:
            MembershipError: one of them cannot leave; none does then.
        """
        with self._changed:
            self._require_change()
            for rank in ranks:
                require_drainable(engine_of(self._models, rank)[1], self._to_drain)
            require_others(self._models, ranks, self._to_drain)
            self._to_drain |= dict.fromkeys(ranks, seconds)
            if notice:
                self._notices |= dict.fromkeys(ranks, time.monotonic() + notice)
                self._forget_notices()
            self._begin_drains()

    def add(self, count: int, name: str = "") -> list[int]:
        """Has engines join: begins to start them and returns.

        Args:
            name: of the model; by default the first one.

        Returns:
            Their numbers.

        Raises:
            MembershipError: they cannot join; none does then.
        """
        with self._changed:
            self._require_change()
            self._forget_notices()
            model = model_named(self._models, name)
            ranks = places_for(model, count)
            self._begin_joins(model, ranks)
        return ranks

    def _begin_joins(self, model: ServedModel, ranks: Sequence[int]) -> None:
        for rank in ranks:
            what: dict[str, Any] = {"args": (model, model.join(rank)), "name": f"join-{rank}"}
            threading.Thread(target=self._start, daemon=True, **what).start()

    @property
    def waiting(self) -> list[Engine]:
        """Engines that have started and join with the next update."""
        joiners = [engine for model in self._models.values() for engine in model.joiners]
        return [engine for engine in joiners if engine.state is EngineState.READY]

    @property
    def leaving(self) -> list[Engine]:
        """Engines that are draining: their processes are not gone yet."""
        with self._changed:
            return list(self._draining)

    def begin_update(self) -> None:
        """From now on nobody leaves; returns when who was leaving has, and who had started takes part.

        Raises:
            TimeoutError: one of them has not ended.
        """
        with self._changed:
            begun, self._updating = self._updating, True
            self._forget_notices()
            self._changed.notify_all()
        self._await_drains(END_TIMEOUT)
        if late := self.leaving:
            raise TimeoutError(f"{late[0]} was drained and has not ended after {END_TIMEOUT:.0f} s")
        if not begun:
            self._take_in()

    def end_update(self) -> None:
        """Whoever was asked to leave since the update began does."""
        with self._changed:
            self._updating = False
            self._begin_drains()

    def stop(self) -> None:
        """From now on nobody leaves or joins, and whoever is leaving is ended at once."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def await_end(self) -> None:
        """Returns when those that were leaving have, or do not."""
        self._await_drains(_STOP_TIMEOUT)

    def _forget_notices(self) -> None:
        """Has places filled again whose notice has ended, and others not."""
        with self._changed:
            now = time.monotonic()
            self._notices = {rank: end for rank, end in self._notices.items() if end > now}
            for model in self._models.values():
                model.withhold(self._notices)

    def _start(self, model: ServedModel, engine: Engine) -> None:
        """Waits for an engine that joins; one that takes updates is taken in when the next one begins."""
        logger.warning("%s starts, to join the run", engine)
        try:
            model.await_joiner(engine, self._start_timeout)
        except START_ERRORS as error:
            self._lose(model, engine, str(error))
            return
        if not model.takes_updates:
            model.take_in(engine)
            try:
                model.admit(engine)
            except RouterError as error:  # whoever watches them tells which of the two has ended
                logger.warning("%s does not join the run: %s", engine, error)

    def _lose(self, model: ServedModel, engine: Engine, reason: str) -> None:
        """Ends one that has not joined yet."""
        engine.become(EngineState.DEAD, reason)
        try:
            engine.end()
        finally:
            model.forget_joiner(engine)
            logger.warning("%s does not join the run: %s", engine, reason)

    def _take_in(self) -> None:
        """Has those that have started take part in the update that begins."""
        for model in self._models.values():
            for engine in model.joiners if model.takes_updates else ():
                if engine.state is not EngineState.READY:
                    continue
                if (reason := engine.handle.failure_reason()) is None:
                    model.take_in(engine)
                    logger.warning("%s joins the run", engine)
                else:
                    what: dict[str, Any] = {"args": (model, engine, reason), "name": f"lose-{engine.rank}"}
                    threading.Thread(target=self._lose, daemon=True, **what).start()

    def _require_change(self) -> None:
        if self._stopped:
            raise MembershipError("the run is ending")
        if self._starts_again:  # places are free that engines are about to take
            raise MembershipError("the rollout side starts again (wanted: one that has started)")
        if self._refusal:
            raise MembershipError(self._refusal)

    def _begin_drains(self) -> None:
        """Begins what has been asked for, unless an update is under way."""
        if self._updating or self._stopped:
            return
        asked, self._to_drain = self._to_drain, {}
        for rank, seconds in asked.items():
            try:
                model, engine = engine_of(self._models, rank)
                require_drainable(engine, self._to_drain)
                require_others(self._models, [rank], self._to_drain)
            except MembershipError as error:  # something has befallen it, or others, in the update
                logger.warning("engine %d is not drained: %s", rank, error)
                continue
            if engine.become(EngineState.DRAINING):
                self._draining.add(engine)
                what: dict[str, Any] = {"args": (model, engine, seconds), "name": f"drain-{rank}"}
                threading.Thread(target=self._drain, daemon=True, **what).start()

    def _drain(self, model: ServedModel, engine: Engine, seconds: float) -> None:
        logger.warning("%s leaves the run", engine)
        try:
            model.dismiss(engine)
            self._await_answers(engine, seconds)
        except RouterError as error:  # it has ended for good, which whoever watches it tells
            logger.warning("%s leaves, and its router does not answer: %s", engine, error)
        finally:
            self._let_go(model, engine)

    def _let_go(self, model: ServedModel, engine: Engine) -> None:
        try:
            engine.end()
        finally:
            model.let_go(engine)
            with self._changed:
                self._draining.discard(engine)
                self._changed.notify_all()
            logger.warning("%s has left the run", engine)

    def _await_answers(self, engine: Engine, seconds: float) -> None:
        """Returns when it has nothing left to answer, or may not go on."""
        answered, idle = time.monotonic(), 0
        deadline = answered + seconds
        if (end := self._notices.get(engine.rank)) is not None:
            deadline = min(deadline, end - _BEFORE_NOTICE)
        while idle < _IDLE_LOOKS and time.monotonic() < deadline:
            with self._changed:
                if self._updating or self._stopped:
                    return
                self._changed.wait(_LOOK_AGAIN)
                if self._updating or self._stopped:
                    return
            held = requests_held(engine)
            if held is None and time.monotonic() - answered > self._silence:
                logger.warning("%s leaves, and has not answered for %.0f s", engine, self._silence)
                return
            answered = answered if held is None else time.monotonic()
            idle = idle + 1 if held == 0 else 0

    def _await_drains(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._draining and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
