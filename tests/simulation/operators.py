"""Whoever has engines leave and join a run under simulation, at times that the seed decides."""

from collections.abc import Callable, Sequence
from typing import Any

from slime.ray.engine import EngineState, MembershipError
from slime.ray.losses import RolloutSideLost
from slime.ray.membership import Membership
from slime.ray.served_model import ServedModel
from slime.ray.waiting import DeadlineExceeded, ProcessDied

_NOT_NOW = (MembershipError, RolloutSideLost, ProcessDied, DeadlineExceeded)
_NOTICE = 60.0  # seconds
_FEW, _MANY = 1.0, 1000.0  # seconds for the requests of an engine that leaves


class Operator:
    """Asks as ``slime engines`` does, through the driver.

    Attributes:
        asked: numbers of engines of the rollout manager that were asked to leave: whoever has them may be
            ended though nothing has befallen it.
        drained: how many of them there were.
        notices: by number, until when no engine may start in the place of one that was asked to leave.
        left: numbers of engines of which the operator was told that they leave.
        joining: the same of those that join; they may serve by now.
        added: how many engines were started to join.
    """

    def __init__(self, sim: Any) -> None:
        self._sim = sim
        self.drained = self.added = 0
        self.forget()

    def forget(self) -> None:
        """The run is another one from now on."""
        self.asked: set[int] = set()
        self.notices: dict[int, float] = {}
        self.left: set[int] = set()
        self.joining: set[int] = set()

    def begin(self) -> None:
        """Sets the times."""
        for seconds in self._sim.plan.drains:
            self._sim.world.after(seconds, self._ask, self._drain)
        for seconds in self._sim.plan.adds:
            self._sim.world.after(seconds, self._ask, self._add)

    def _ask(self, what: Callable[[], None]) -> None:
        if self._sim.rollout is not None and self._sim.rollout._ready and not self._sim.outcome:
            self._sim.world.spawn("operator", what, process="run")

    def _add(self) -> None:
        world = self._sim.world
        try:
            ranks = self._sim.rollout.ask_fleet("add", world.rng.choice((1, 1, 2)))
        except _NOT_NOW as error:
            world.note(f"nobody joins: {str(error).splitlines()[-1][:100]}")
            return
        self.joining |= {*ranks}
        world.note(f"engines {ranks} are asked to join")

    def _drain(self) -> None:
        world, rollout = self._sim.world, self._sim.rollout
        try:
            rows, began = rollout.ask_fleet("rows"), world.now
            ranks = [row.rank for row in rows if row.state == "serving"]
            if not ranks:
                return
            rank = world.rng.choice(ranks)
            notice = world.rng.choice((0.0, 0.0, _NOTICE))
            rollout.ask_fleet("drain", [rank], world.rng.choice((_FEW, _MANY)), notice)
        except _NOT_NOW as error:
            world.note(f"nobody is drained: {str(error).splitlines()[-1][:100]}")
            return
        self.left.add(rank)
        if notice:
            self.notices[rank] = began + notice
        world.note(f"engine {rank} is asked to leave")

    def are_asked(self, ranks: Sequence[int]) -> None:
        """Engines are to leave. A fleet that takes one that is dead or hangs for well may lose its last one
        that is.
        """
        self.asked |= {*ranks}
        self.joining -= {*ranks}
        others = [engine for engine in self._sim.serving() if engine.rank not in ranks]
        servers = [self._sim.network.servers[engine.url] for engine in others]
        if others and not any(server.alive and not server.hung for server in servers):
            self._sim.faults.excuse = "the last engine that was well is drained, beside one that is not"

    def are_to_join(self, ranks: Sequence[int]) -> None:
        """Engines start on places that others may have left."""
        self.added += len(ranks)
        self.left -= {*ranks}
        self.asked -= {*ranks}
        self.joining -= {*ranks}  # an earlier one; the driver knows of those that it is asked for
        self._sim.rules.unwanted -= {*ranks}


class WatchedMembership(Membership):
    """Tells who is asked to leave or to join, whoever asks."""

    sim: Any = None

    def drain(self, ranks: Sequence[int], seconds: float, notice: float = 0.0) -> None:
        self.sim.operator.are_asked(ranks)
        super().drain(ranks, seconds, notice)
        self.sim.operator.drained += len(ranks)

    def _begin_joins(self, model: ServedModel, ranks: Sequence[int]) -> None:
        if not self._starts_again:  # else they were asked to join before
            self.sim.operator.are_to_join(ranks)
        super()._begin_joins(model, ranks)

    def _begin_drains(self) -> None:
        super()._begin_drains()
        engines = [engine for model in self._models.values() for engine in model.engines]
        stay = {engine.rank for engine in engines if engine.state is not EngineState.DRAINING}
        self.sim.operator.left -= stay - self._to_drain.keys()
