"""Ray as its callers see it: actors that answer late, out of order or never, and references to answers."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray as real_ray

from tests.simulation.kernel import Waiters, World

LATENCY = 0.004  # seconds on average that a call, or an answer, is on its way


class Ref:
    """An ObjectRef.

    Attributes:
        owner: the process whose end takes the value away; None for the driver's.
    """

    def __init__(self, owner: "Actor | None" = None) -> None:
        self.owner = owner
        self.done, self.value = False, None
        self.error: BaseException | None = None
        self.bells: list[Waiters] = []


class Actor:
    """A process of its own.

    Attributes:
        instance: the object whose methods are called; None until it is made.
        at_end: called when its process has ended, as for what it had started: other actors among it.
    """

    def __init__(self, ray: "Ray", name: str, most: int, make: Callable[[], Any]) -> None:
        self.ray, self.name, self._most = ray, name, most
        self.alive, self.instance = True, None
        self.at_end: list[Callable[[], None]] = []
        self._calls: deque[tuple[Ref, Callable[[], Any], str]] = deque()
        self._running = 0
        self._open: dict[Ref, None] = {}
        self._arrives = 0.0
        self._made = Ref()
        self._deliver(self._made, lambda: self._make(make), "__init__")

    def _make(self, make: Callable[[], Any]) -> None:
        self.instance = make()

    def call(self, method: str, arguments: tuple[Any, ...]) -> Ref:
        ref = Ref()
        if not self.alive:
            self.ray.resolve_later(ref, error=death())
            return ref
        self._open[ref] = None
        world = self.ray.world
        # Calls of one caller come in in their order.
        self._arrives = max(self._arrives, world.now + self.ray.latency())
        invoke = lambda: getattr(self.instance, method)(*arguments)
        world.after(self._arrives - world.now, self._deliver, ref, invoke, method)
        return ref

    def _deliver(self, ref: Ref, invoke: Callable[[], Any], method: str) -> None:
        if self.alive:
            self._calls.append((ref, invoke, method))
            self._begin()

    def _begin(self) -> None:
        if self._calls and self.instance is None and self._calls[0][0] is not self._made:
            return
        while self._calls and self._running < self._most:
            self._running += 1
            call = self._calls.popleft()
            self.ray.world.spawn(f"{self.name}.{call[2]}", partial(self._serve, *call), process=self)
            if self.instance is None:
                return

    def _serve(self, ref: Ref, invoke: Callable[[], Any], method: str) -> None:
        try:
            value = invoke()
        except Exception as error:
            self.ray.world.note(f"{self.name}.{method} raised {type(error).__name__}: {str(error)[:200]}")
            self._answer(ref, None, task_error(method, error))
        else:
            self._answer(ref, value, None)
        self._running -= 1
        self._begin()

    def _answer(self, ref: Ref, value: Any, error: BaseException | None) -> None:
        self._open.pop(ref, None)
        self.ray.resolve_later(ref, value, error)

    def die(self) -> None:
        """Its process has ended: nobody gets an answer any more."""
        if not self.alive:
            return
        self.alive = False
        self.ray.world.note(f"{self.name} died")
        for ref in [*self._open, *(ref for ref, _, _ in self._calls)]:
            self.ray.resolve_later(ref, error=death())
        self._open, self._calls = {}, deque()
        if (ended := getattr(self.instance, "process_ended", None)) is not None:
            ended()
        self.ray.on_end(self)
        for end in self.at_end:
            end()
        self.ray.world.kill(self)


class Handle:
    """What callers have of an actor."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor

    def __getattr__(self, method: str) -> Any:
        return _Method(self._actor, method)


class _Method:
    def __init__(self, actor: Actor, name: str, answers: int = 1) -> None:
        self._actor, self._name, self._answers = actor, name, answers

    def options(self, num_returns: int) -> "_Method":
        return _Method(self._actor, self._name, num_returns)

    def remote(self, *arguments: Any) -> Any:
        ref = self._actor.call(self._name, arguments)
        return ref if self._answers == 1 else [_Part(ref, n) for n in range(self._answers)]


class _Part(Ref):
    """One of several answers to a call."""

    def __init__(self, whole: Ref, number: int) -> None:
        self._whole, self._number, self.owner = whole, number, whole.owner
        self.bells = whole.bells

    @property
    def done(self) -> bool:  # type: ignore[override]
        return self._whole.done

    @property
    def error(self) -> BaseException | None:  # type: ignore[override]
        return self._whole.error

    @property
    def value(self) -> Any:  # type: ignore[override]
        return self._whole.value[self._number]


class _ActorClass:
    def __init__(self, ray: "Ray", kind: type, options: dict[str, Any]) -> None:
        self._ray, self._kind, self._options = ray, kind, options

    def options(self, **options: Any) -> "_ActorClass":
        return _ActorClass(self._ray, self._kind, options)

    def remote(self, *arguments: Any, **named: Any) -> Handle:
        ray = self._ray
        number = sum(actor.name.startswith(self._kind.__name__) for actor in ray.actors)
        most = self._options.get("max_concurrency", 1)
        make = lambda: self._kind(*arguments, **named)
        actor = Actor(ray, f"{self._kind.__name__} {number}", most, make)
        ray.actors.append(actor)
        if isinstance(owner := ray.world.current.process, Actor):
            owner.at_end.append(actor.die)
        return Handle(actor)


class Ray:
    """In place of the module."""

    exceptions = real_ray.exceptions
    ObjectRef = Ref

    def __init__(self, world: World) -> None:
        self.world = world
        self.actors: list[Actor] = []
        self.on_end: Callable[[Actor], None] = lambda actor: None

    def latency(self) -> float:
        return self.world.rng.expovariate(1 / LATENCY)

    def remote(self, kind: type) -> _ActorClass:
        return _ActorClass(self, kind, {})

    def put(self, value: Any) -> Ref:
        process = self.world.current.process
        ref = Ref(process if isinstance(process, Actor) else None)
        ref.done, ref.value = True, value
        return ref

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        if isinstance(refs, Sequence):
            return [self.get(ref, timeout) for ref in refs]
        if not refs.done:
            self.wait([refs], timeout=timeout)
        if not refs.done:
            raise self.exceptions.GetTimeoutError
        if refs.error is not None:
            raise refs.error
        if refs.owner is not None and not refs.owner.alive:
            raise self.exceptions.OwnerDiedError("ff" * 28, None, None, None)
        return refs.value

    def wait(
        self, refs: Sequence[Ref], num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Ref], list[Ref]]:
        assert num_returns == 1
        deadline = None if timeout is None else self.world.now + timeout
        while not any(ref.done for ref in refs):
            left = None if deadline is None else deadline - self.world.now
            if left is not None and left <= 0:
                break
            bell: Waiters = deque()
            for ref in refs:
                ref.bells.append(bell)
            self.world.block("answers of actors", left, bell)
        first = next((ref for ref in refs if ref.done), None)
        return ([] if first is None else [first]), [ref for ref in refs if ref is not first]

    def kill(self, handle: Handle) -> None:
        handle._actor.die()

    def resolve_later(self, ref: Ref, value: Any = None, error: BaseException | None = None) -> None:
        self.world.after(self.latency(), self._resolve, ref, value, error)

    def _resolve(self, ref: Ref, value: Any, error: BaseException | None) -> None:
        if not ref.done:
            ref.done, ref.value, ref.error = True, value, error
            for bell in ref.bells:
                self.world.wake_all(bell)


def task_error(method: str, error: Exception) -> BaseException:
    """What a caller gets for what a method raised."""
    wrapped = real_ray.exceptions.RayTaskError(method, f"Traceback:\n{type(error).__name__}: {error}", error)
    return wrapped.as_instanceof_cause()


def death() -> BaseException:
    return real_ray.exceptions.ActorDiedError()
