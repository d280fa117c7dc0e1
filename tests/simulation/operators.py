"""Whoever has engines leave and join a run under simulation, at times that the seed decides."""

from collections.abc import Callable, Sequence
from typing import Any

from slime.ray.engine import MembershipError
from slime.ray.losses import RolloutSideLost
from slime.ray.membership import Membership
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
        added: how many engines were started to join.
    """

    def __init__(self, sim: Any) -> None:
        self._sim = sim
        self.asked: set[int] = set()
        self.notices: dict[int, float] = {}
        self.drained = self.added = 0

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
        if notice:
            self.notices[rank] = began + notice
        world.note(f"engine {rank} is asked to leave")

    def are_asked(self, ranks: Sequence[int]) -> None:
        """Engines are to leave. A fleet that takes one that is dead or hangs for well may lose its last one
        that is.
        """
        self.asked |= {*ranks}
        others = [engine for engine in self._sim.serving() if engine.rank not in ranks]
        servers = [self._sim.network.servers[engine.url] for engine in others]
        if others and not any(server.alive and not server.hung for server in servers):
            self._sim.faults.excuse = "the last engine that was well is drained, beside one that is not"


class WatchedMembership(Membership):
    """Tells who is asked to leave or to join, whoever asks."""

    sim: Any = None

    def drain(self, ranks: Sequence[int], seconds: float, notice: float = 0.0) -> None:
        self.sim.operator.are_asked(ranks)
        super().drain(ranks, seconds, notice)
        self.sim.operator.drained += len(ranks)

    def add(self, count: int, name: str = "") -> list[int]:
        ranks = super().add(count, name)
        self.sim.operator.added += len(ranks)
        return ranks
