"""The engines of one model, whichever of its groups they belong to, and the places that none has."""

from collections.abc import Collection, Sequence

from slime.ray.engine import Engine, EngineState
from slime.ray.engine_group import EngineGroup
from slime.ray.engine_place import EnginePlace


class ModelEngines:
    """The groups of a model as one."""

    def __init__(self, groups: Sequence[EngineGroup]) -> None:
        self._groups = list(groups)

    @property
    def engines(self) -> list[Engine]:
        return [engine for group in self._groups for engine in group.engines]

    @property
    def living(self) -> list[Engine]:
        """The engines that have started and not died since."""
        return [engine for engine in self.engines if engine.lives]

    @property
    def dead(self) -> list[Engine]:
        """The dead engines that have not been replaced yet."""
        return [engine for engine in self.engines if engine.state is EngineState.DEAD]

    @property
    def starting(self) -> list[Engine]:
        """The engines that were launched and do not serve yet."""
        return [engine for engine in self.engines if engine.state is EngineState.STARTING]

    @property
    def joiners(self) -> list[Engine]:
        """Engines that start beside the others, or have, and are none of them yet."""
        return [engine for group in self._groups for engine in group.joiners]

    @property
    def launches(self) -> int:
        """Engines started so far."""
        return sum(group.launches for group in self._groups)

    @property
    def replaced(self) -> int:
        """Engines that were started in place of others."""
        return sum(group.replaced for group in self._groups)

    @property
    def drained(self) -> int:
        """Engines that have left for good."""
        return sum(group.drained for group in self._groups)

    @property
    def has_changed(self) -> bool:
        """Whether any of its first engines has died or left, or others have come."""
        joined = sum(group.joined for group in self._groups)
        return bool(joined or self.replaced or self.drained or self.dead)

    def replace_gone(self) -> list[Engine]:
        """Begins to start engines in place of those that are gone, and returns them."""
        return [engine for group in self._groups for engine in group.replace_gone()]

    def let_go(self, engine: Engine) -> None:
        """Forgets an engine that has left and ended."""
        for group in self._groups:
            if engine in group.engines:
                group.let_go(engine)

    def join(self, rank: int) -> Engine:
        """Begins to start an engine on a free place; it is one of `joiners` until it is taken in."""
        return next(group for group in self._groups if rank in group.free_ranks()).join(rank)

    def await_joiner(self, joiner: Engine, timeout: float) -> None:
        """Returns when it serves HTTP; ``timeout`` in seconds."""
        self._group_of(joiner).await_joiner(joiner, timeout)

    def take_in(self, joiner: Engine) -> None:
        """Makes it one of the engines."""
        self._group_of(joiner).take_in(joiner)

    def forget_joiner(self, joiner: Engine) -> None:
        """Forgets one that has ended before it was taken in."""
        self._group_of(joiner).forget_joiner(joiner)

    def _group_of(self, joiner: Engine) -> EngineGroup:
        return next(group for group in self._groups if joiner in group.joiners)

    def free_ranks(self) -> list[int]:
        """The numbers of the places that no engine has and that may be filled."""
        return [rank for group in self._groups for rank in group.free_ranks()]

    def empty_ranks(self) -> list[int]:
        """The numbers of the places that no engine has."""
        return [rank for group in self._groups for rank in group.empty_ranks()]

    def withhold(self, ranks: Collection[int]) -> None:
        """Has no engine start on these places, and on all others again."""
        for group in self._groups:
            group.withhold(ranks)

    def wait_ready(self, timeout: float) -> None:
        """Returns when all engines that were launched serve; ``timeout`` in seconds."""
        for group in self._groups:
            group.wait_ready(timeout)

    def place_of(self, rank: int) -> EnginePlace:
        """What is known of the place of this number, whoever has it."""
        return next(group.places[rank] for group in self._groups if rank in group.places)
