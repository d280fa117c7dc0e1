"""What befalls a run under simulation, and which of it no run is promised to survive."""

import math
from collections import Counter
from typing import Any

from slime.ray.rollout_group import MANAGER_RESTARTS
from slime.utils.weight_clock import clock
from tests.simulation.engines import EngineServer

_MAX_FAULTS = 6  # of engines, in one history
_SURVIVED_IN_AN_UPDATE = 4  # of engines
_WHILE_REGISTERED = 0.2
"""How likely an engine is hit when a router is told of it, beside when weights come."""


class Faults:
    """Hits engines, the router and the rollout manager, at times that the seed decides.

    Attributes:
        engines: how often an engine was hit.
        routers: how often a router was killed.
        managers: how often a rollout manager was killed.
        excuse: why an error may end the run; empty if none may.
    """

    def __init__(self, sim: Any) -> None:
        self._sim = sim
        self.engines = self.routers = self.managers = 0
        self._hits, self._hangs = Counter[int](), Counter[int]()  # by the number of the update
        self.excuse = ""
        if sim.plan.loss or sim.plan.delay:
            self.excuse = "control requests are lost, or so late that engines seem to be dead"

    def begin(self) -> None:
        """Sets the times."""
        world, plan = self._sim.world, self._sim.plan
        world.after(world.rng.uniform(10.0, 60.0), self._trouble)
        for seconds in plan.router_deaths:
            world.after(seconds, self._kill_router)
        for seconds in plan.manager_deaths:
            world.after(seconds, self._kill_manager)

    def _trouble(self) -> None:
        """Faults of engines, one after the other."""
        rng, world = self._sim.world.rng, self._sim.world
        if self._sim.plan.faults is None or self._sim.outcome:
            return
        world.after(rng.expovariate(1 / self._sim.plan.faults), self._trouble)
        alive = [engine for engine in self._sim.engines if engine.alive]
        if self._sim.plan.silent:
            self._silence(rng.choice(self._healthy() or [None]))
            return
        if not alive or self.engines >= _MAX_FAULTS:
            return
        self.engines += 1
        engine, kind = rng.choice(alive), rng.random()
        self._note_excuse(engine, hangs=0.5 <= kind < 0.9)
        if kind < 0.5:
            engine.die("was killed by SIGKILL")
        elif kind < 0.9:
            engine.hang(rng.choice((1.0, 10.0, 100.0, 1e6)) * (0.5 + rng.random()))
        else:
            self._lose_actor(engine)

    def _kill_router(self) -> None:
        """Kills it, or has it hang, unless it has ended or not started yet."""
        if self._sim.router is not None and self._sim.router.alive and not self._sim.outcome:
            self.routers += 1
            if not self._sim.plan.tolerant:
                self.excuse = "no death is tolerated"
            if int(self._sim.world.now * 1000) % 3:
                self._sim.router.die("was killed by SIGKILL")
            else:
                self._sim.router.hang()

    def _kill_manager(self) -> None:
        """Kills it, unless the run has ended or ends."""
        manager, fleet = self._sim.manager, self._sim.fleet
        ends = self._sim.outcome or (fleet is not None and fleet._starts.stopped)
        if manager is None or not manager.alive or ends:
            return
        self.managers += 1
        if not self._may_restart:
            self.excuse = "a rollout side that is lost now is not started again"
        manager.die()
        self._sim.left_behind = []  # that is about a fleet that was asked to stop

    @property
    def _may_restart(self) -> bool:
        """Whether the rollout side is started again if it is lost now."""
        plan, rollout = self._sim.plan, self._sim.rollout
        begun = rollout is not None and rollout._state is not None
        return plan.tolerant and begun and rollout._restarts < MANAGER_RESTARTS

    def weights_come(self) -> None:
        """One of the engines may be hit while it is given weights."""
        rng = self._sim.world.rng
        if rng.random() < self._sim.plan.strikes:
            self._sim.world.after(rng.random() * rng.choice((0.1, 1.0)), self._strike)

    def is_registered(self, engine: EngineServer) -> None:
        """A router is told of an engine, which may be hit just then."""
        rng, plan = self._sim.world.rng, self._sim.plan
        struck = rng.random() < _WHILE_REGISTERED * plan.strikes and self.engines < _MAX_FAULTS
        if struck and engine.alive and (plan.tolerant or self._sim.joins(engine)):
            self.engines += 1
            if rng.random() < 0.7 or not plan.tolerant:
                self._note_excuse(engine, hangs=False)
                engine.die("was killed by SIGKILL")
            else:
                self._note_excuse(engine, hangs=True)
                engine.hang(rng.choice((1.0, 1e6)))

    def _strike(self) -> None:
        rng, alive = self._sim.world.rng, [engine for engine in self._sim.engines if engine.alive]
        if not self._sim.plan.tolerant and self._sim.plan.adds:
            alive = [engine for engine in alive if self._sim.joins(engine)]
        if alive and self.engines < _MAX_FAULTS:
            self.engines += 1
            engine, hangs = rng.choice(alive), rng.random() < 0.2 and self._sim.plan.tolerant
            self._note_excuse(engine, hangs)
            if hangs:
                engine.hang(rng.choice((1.0, 200.0, 1e6)))
            else:
                engine.die("was killed by SIGKILL")

    def _healthy(self) -> list[EngineServer]:
        servers = [self._sim.network.servers[engine.url] for engine in self._sim.serving()]
        return [server for server in servers if server.alive and not server.hung]

    def _silence(self, engine: EngineServer | None) -> None:
        """Has it answer nothing any more, while others do, and while health is checked."""
        checked = self._sim.fleet is not None and self._sim.fleet._watch._check_due < math.inf
        if engine is not None and checked and not self.engines and len(self._healthy()) > 1:
            self.engines += 1
            engine.hang(1e6)

    def _note_excuse(self, engine: EngineServer, hangs: bool) -> None:
        """What no run is promised to survive."""
        update = clock.updates if clock.updating else 0
        self._hits[update] += 1
        self._hangs[update] += hangs
        if not self._sim.plan.tolerant:
            if hangs or not self._sim.joins(engine):
                self.excuse = "no death is tolerated"
        elif update and self._hits[update] > _SURVIVED_IN_AN_UPDATE:
            self.excuse = "an update, or a start of engines, failed again and again"
        elif update and self._hangs[update] > 1:
            self.excuse = "engines hang one after the other in an update, longer than other ranks wait"
        elif not self._others(engine) and (self._sim.plan.fully_async or not self._may_restart):
            # A worker that generates between rollouts waits for no restart.
            self.excuse = "it was the last engine that served"

    def _others(self, engine: EngineServer) -> list[EngineServer]:
        return [server for server in self._healthy() if server.url != engine.url]

    def _lose_actor(self, engine: EngineServer) -> None:
        for actor in self._sim.ray.actors:
            if actor.alive and getattr(actor.instance, "server", None) is engine:
                actor.die()
