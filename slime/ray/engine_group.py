"""Engines of one kind, and where they come from."""

import threading
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from slime.backends.sglang_utils.client import REQUEST_TIMEOUT_S
from slime.ray.engine import Engine, EngineHandle, EngineState
from slime.ray.engine_place import EnginePlace
from slime.utils.types import EngineEndpoint


class EngineSource(Protocol):
    """A way to get engines. Each has a place among those of the source, from 0."""

    def can_fill(self, place: int) -> bool:
        """Whether a place whose engine died can be filled again now."""

    def __len__(self) -> int:
        """The number of places."""

    def launch(self, place: int, rank: int) -> EngineHandle:
        """Begins to start an engine and returns at once."""

    def wait_ready(self, handles: Sequence[Any], timeout: float) -> list[EngineEndpoint]:
        """Waits until all engines of this source serve, and returns where; raises as soon as one fails.

        Raises:
            EngineStartError: one ended, or did not serve within ``timeout`` seconds.
        """


class EngineGroup:
    """The engines of one source, all of one kind.

    Args:
        kind: what the router is told about them: "regular", "prefill" or "decode".
        first_rank: the number of the first of them among all engines of the run.
        model: whose engines they are, for messages; empty in a run of one model.
        spare: whether its places are empty at first, for engines that join.
        answer_timeout: seconds that each may take over a request of its control plane.

    Attributes:
        engines: by place, the dead that were not replaced included; a place that a drained engine has left
            has none. The list is replaced and never changed: other threads may go over it meanwhile.
        places: what is known of each place, by number.
        joiners: those that start, or have started, and are none of the engines yet; replaced alike.
        launches: engines that were among them so far; a replacement may serve at its predecessor's address.
        joined: those of them that came while the run went on.
        replaced: those of them that took the place of a dead one.
        drained: engines that have left for good.
    """

    def __init__(
        self,
        source: EngineSource,
        *,
        kind: str = "regular",
        first_rank: int = 0,
        model: str = "",
        spare: bool = False,
        answer_timeout: float = REQUEST_TIMEOUT_S,
    ) -> None:
        self._source, self._kind, self._first_rank, self._model = source, kind, first_rank, model
        self._spare, self._answer_timeout = spare, answer_timeout
        self.places = {first_rank + place: EnginePlace() for place in range(len(source))}
        self.engines: list[Engine] = []
        self.joiners: list[Engine] = []
        self._withheld: frozenset[int] = frozenset()
        self.launches = self.joined = self.replaced = self.drained = 0
        self._changing = threading.Lock()

    def launch(self, ranks: Collection[int] | None = None) -> None:
        """Begins to start an engine for every place, unless they are spare.

        Args:
            ranks: in the place of that, the numbers of those that have engines in a run that went on so far.
        """
        places = range(self._first_rank, self._first_rank + len(self._source))
        taken = [rank for rank in places if (not self._spare if ranks is None else rank in ranks)]
        self.engines = [self._launch(rank) for rank in taken]
        self.launches += len(taken)
        if self._spare:
            self.joined += len(taken)
        else:
            self.drained += len(places) - len(taken)

    def replace_gone(self) -> list[Engine]:
        """Begins to start engines in place of those that are gone.

        An engine that is dead and not gone yet keeps its place: its address and GPUs are still taken. So
        does one whose place cannot be filled now. One that joined and never served leaves its place empty.
        """
        engines, fresh = [], []
        with self._changing:
            for engine in self.engines:
                place = engine.rank - self._first_rank
                is_free = engine.state is EngineState.DEAD and engine.gone.is_set()
                if is_free and engine.joins:
                    engine.place.changed()
                    continue
                if is_free and engine.rank not in self._withheld and self._source.can_fill(place):
                    engine = self._launch(engine.rank)
                    fresh.append(engine)
                engines.append(engine)
            self.engines = engines
            self.replaced += len(fresh)
            self.launches += len(fresh)
        return fresh

    def join(self, rank: int) -> Engine:
        """Begins to start an engine on a free place, beside the others."""
        with self._changing:
            engine = self._launch(rank)
            engine.joins = True
            self.joiners = [*self.joiners, engine]
        return engine

    def await_joiner(self, engine: Engine, timeout: float) -> None:
        """Returns when it serves HTTP.

        Raises:
            EngineStartError: it ended, or did not serve within ``timeout`` seconds.
        """
        (endpoint,) = self._source.wait_ready([engine.handle], timeout)
        engine.started(endpoint)

    def take_in(self, joiner: Engine) -> None:
        """Makes it one of the engines."""
        with self._changing:
            self.joiners = [other for other in self.joiners if other is not joiner]
            self.engines = sorted([*self.engines, joiner], key=lambda engine: engine.rank)
            self.joined += 1
            self.launches += 1

    def forget_joiner(self, joiner: Engine) -> None:
        """Forgets one that has ended before it was taken in: its place is free."""
        with self._changing:
            self.joiners = [other for other in self.joiners if other is not joiner]
            joiner.place.changed()

    def let_go(self, engine: Engine) -> None:
        """Forgets an engine that has left and ended: its place is free."""
        with self._changing:
            self.engines = [other for other in self.engines if other is not engine]
            self.drained += 1
            engine.place.changed()

    def withhold(self, ranks: Collection[int]) -> None:
        """Has no engine start on these places, and on all others of the group again."""
        self._withheld = frozenset(ranks)

    def free_ranks(self) -> list[int]:
        """The numbers of the places that no engine has, dead or alive, and that may be filled."""
        return [rank for rank in self.empty_ranks() if rank not in self._withheld]

    def empty_ranks(self) -> list[int]:
        """The numbers of the places that no engine has, dead or alive."""
        taken = {engine.rank for engine in (*self.engines, *self.joiners)}
        places = range(self._first_rank, self._first_rank + len(self._source))
        return [rank for rank in places if rank not in taken]

    def wait_ready(self, timeout: float) -> None:
        """Returns when every engine that was launched serves."""
        starting = [engine for engine in self.engines if engine.state is EngineState.STARTING]
        endpoints = self._source.wait_ready([engine.handle for engine in starting], timeout)
        for engine, endpoint in zip(starting, endpoints, strict=True):
            engine.started(endpoint)

    def _launch(self, rank: int) -> Engine:
        handle = self._source.launch(rank - self._first_rank, rank)
        return Engine(
            rank,
            handle,
            kind=self._kind,
            model=self._model,
            place=self.places[rank],
            answer_timeout=self._answer_timeout,
        )
