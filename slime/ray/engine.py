"""One engine of the fleet, what it is good for, and the one way in which that changes."""

import threading
from enum import Enum
from functools import cached_property
from typing import Protocol

from slime.backends.sglang_utils.client import REQUEST_TIMEOUT_S, EngineClient
from slime.ray.engine_place import EnginePlace
from slime.ray.process_watch import ProcessLocation
from slime.utils.types import EngineEndpoint


class EngineState(Enum):
    """What an engine is good for.

    READY: it serves HTTP, but is not routed to yet or has no current weights.
    DRAINING: it leaves the run for good: it gets no requests and no weights any more, answers what it has,
        and is ended then. Its death is none.
    DEAD: for good; what takes its place is another engine.
    """

    STARTING = "starting"
    READY = "ready"
    SERVING = "serving"
    DRAINING = "draining"
    DEAD = "dead"


_FOLLOWING: dict[EngineState, tuple[EngineState, ...]] = {
    EngineState.STARTING: (EngineState.READY, EngineState.DEAD),
    EngineState.READY: (EngineState.SERVING, EngineState.DEAD),
    EngineState.SERVING: (EngineState.DRAINING, EngineState.DEAD),
    EngineState.DRAINING: (),
    EngineState.DEAD: (),
}


class MembershipError(RuntimeError):
    """Engines cannot come or go as was asked; it says what was found and what is wanted."""


class IllegalStateChange(RuntimeError):
    """An engine was to become what it cannot."""


class EngineHandle(Protocol):
    """What the source of an engine gives for it."""

    def failure_reason(self) -> str | None:
        """Why it no longer serves; None while it does. May take half a minute to say."""

    def processes(self) -> list[ProcessLocation]:
        """The processes that hold its memory until they end, of those that are ours to end."""

    def updated(self, version: str) -> None:
        """Takes note that the engine serves these weights from now on."""

    def end(self) -> None:
        """Ends it, if it is ours to end."""


class Engine:
    """One serving unit: one HTTP endpoint, on one GPU or many.

    Args:
        place: which it has, and tells of its changes.
        answer_timeout: seconds that it may take over a request of its control plane.

    Attributes:
        rank: its number among all engines of the run; a replacement has its predecessor's.
        kind: what the router is told about it.
        model: whose engine it is, for messages; empty in a run of one model.
        joins: whether it came while the run went on, and has not served yet: its death costs itself alone.
        version: of the weights that it was last found to have; empty before.
        gone: set once it has left the router and its process has ended.
    """

    def __init__(
        self,
        rank: int,
        handle: EngineHandle,
        *,
        kind: str = "regular",
        model: str = "",
        place: EnginePlace | None = None,
        answer_timeout: float = REQUEST_TIMEOUT_S,
    ) -> None:
        self.rank, self.handle, self.kind, self.model = rank, handle, kind, model
        self.place, self.version, self.joins = place or EnginePlace(), "", False
        self.place.changed()
        self._answer_timeout = answer_timeout
        self.gone = threading.Event()
        self._endpoint: EngineEndpoint | None = None
        self._state = EngineState.STARTING
        self._ended = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        where = f" ({self._endpoint.url})" if self._endpoint else ""
        return f"engine {self.rank}{f' of {self.model}' if self.model else ''}{where}"

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def lives(self) -> bool:
        """Whether it has started and not died since."""
        return self._state in (EngineState.READY, EngineState.SERVING)

    @property
    def has_started(self) -> bool:
        """Whether it has an address."""
        return self._endpoint is not None

    @property
    def endpoint(self) -> EngineEndpoint:
        assert self._endpoint is not None, f"{self} has not started"
        return self._endpoint

    @property
    def url(self) -> str:
        return self.endpoint.url

    @property
    def is_colocated(self) -> bool:
        """Whether it shares its GPUs with the trainer."""
        return self.endpoint.gpu_offset is not None

    @cached_property
    def client(self) -> EngineClient:
        """The client of the engine's control plane."""
        return EngineClient(self.endpoint, self._answer_timeout)

    def started(self, endpoint: EngineEndpoint) -> None:
        self._endpoint = endpoint
        self.become(EngineState.READY)

    def become(self, state: EngineState, reason: str = "") -> bool:
        """Changes the state. False if it was dead, or was leaving: then it stays so.

        Args:
            reason: why it has died.

        Raises:
            IllegalStateChange: a living engine cannot become that.
        """
        with self._lock:
            if not _FOLLOWING[self._state]:
                return False
            if state not in _FOLLOWING[self._state]:
                raise IllegalStateChange(f"{self} is {self._state.value}: it cannot become {state.value}")
            self._state = state
            self.joins = self.joins and state is not EngineState.SERVING
            self.place.changed(reason)
            return True

    def updated(self, version: str) -> None:
        """Takes note that it serves these weights from now on, unless it has died or leaves meanwhile."""
        self.handle.updated(version)
        if self.lives:
            self.version = version

    def end(self) -> None:
        """Ends its process; does nothing if it was called before."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        try:
            self.handle.end()
        finally:
            self.gone.set()
