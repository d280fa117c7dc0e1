"""One whole life of a run under simulation, which a seed decides.

history = play(17)
history.digest      # of its trace: the same whenever and wherever the seed is played
history.outcome     # "trained", or the error that ended the run
"""

import atexit
import functools
import itertools
import json
import logging
import pickle  # of what this process made itself
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.arguments.core.run_args import copied
from slime.config.run import run_config
from slime.observability.run_log import RunLog
from slime.observability.tracking import Tracker
from slime.ray import asynchronous, synchronous
from slime.ray.engine import EngineState
from slime.ray.rollout_group import RolloutGroup
from slime.ray.train_group import RayTrainGroup
from slime.rollout import fully_async_rollout
from slime.rollout.generate_state import GenerateState
from slime.utils.background_generation import background_generation
from slime.utils.data import Dataset
from slime.utils.engine_count import engine_count
from slime.utils.http_utils import init_http_client
from slime.utils.weight_clock import clock
from tests.simulation.actors import Actor, Ray
from tests.simulation.engines import EngineServer
from tests.simulation.faults import Faults
from tests.simulation.invariants import Rules
from tests.simulation.kernel import Violation, World
from tests.simulation.network import Network
from tests.simulation.operators import Operator
from tests.simulation.plan import Plan, args_of, draw
from tests.simulation.seams import in_place
from tests.simulation.stand_ins import Event, Modules
from tests.simulation.trainers import Gloo

BUGS = (AssertionError, KeyError, IndexError, AttributeError, NameError, TypeError)
"""Errors by which no run may end, whatever it has met."""
MANAGER = "RolloutManager"


class Slots:
    """GPUs that nobody looks at."""

    def __init__(self, count: int) -> None:
        self.gpu_ids = [0] * count

    def __len__(self) -> int:
        return len(self.gpu_ids)

    def slice(self, first: int, last: int) -> "Slots":
        return Slots(last - first)

    def strategy(self, slot: int) -> None:
        return None


class Disk:
    """What outlives a run: data states and checkpoints, by rollout."""

    def __init__(self) -> None:
        self._states: dict[int, bytes] = {}
        self.checkpoints: dict[int, tuple[int, dict[str, Any]]] = {}

    def place(self, rollout_id: int) -> Any:
        return _Place(self, rollout_id)

    def write(self, state: dict[str, Any], place: "_Place") -> None:
        self._states[place.rollout_id] = pickle.dumps(state)

    def read(self, place: "_Place") -> dict[str, Any]:
        return pickle.loads(self._states[place.rollout_id])  # noqa: S301

    @property
    def states(self) -> dict[int, dict[str, Any]]:
        return {number: pickle.loads(state) for number, state in self._states.items()}  # noqa: S301

    def groups(self, state: dict[str, Any]) -> list[int]:
        """The numbers of the groups that a state holds."""
        return [_first(group)["group_index"] for group in [*state["leased"], *state["buffer"]]]

    def checkpoint(self) -> tuple[int, int, dict[str, Any]] | None:
        """The newest: its rollout, training state and what was saved along."""
        if not self.checkpoints:
            return None
        rollout_id = max(self.checkpoints)
        return rollout_id, *self.checkpoints[rollout_id]


@dataclass
class _Place:
    disk: Disk
    rollout_id: int

    def exists(self) -> bool:
        return self.rollout_id in self.disk._states


def _first(group: Any) -> Any:
    while isinstance(group, list):
        group = group[0]
    return group


class WatchedGroup(RayTrainGroup):
    """Tells the rules when an update is over."""

    sim: Any = None

    def update_weights(self) -> None:
        self.sim.rules.update_begins()
        try:
            super().update_weights()
        finally:
            self.sim.rules.update_ends()
        self.sim.rules.updated()


class WatchedLog(RunLog):
    """Tells the rules which rollouts the driver has."""

    sim: Any = None

    def rollout(self, rollout_id: int, metrics: Any) -> None:
        self.sim.rules.held = max(self.sim.rules.held, rollout_id)
        super().rollout(rollout_id, metrics)


class Simulation:
    """Everything in one world."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.world = World(plan.seed)
        self.modules = Modules(self.world)
        self.network, self.ray, self.disk = Network(self.world), Ray(self.world), Disk()
        self.network.loss, self.network.delay = plan.loss, plan.delay
        self.gloo, self.rules = Gloo(self), Rules(self)
        self.ports = itertools.count(1)
        self.engines: list[EngineServer] = []
        self.router: Any = None
        self.outcome = ""
        self.resumed = False
        self.left_behind: list[EngineServer] = []  # by the last rollout manager that ended
        self.rollout: RolloutGroup | None = None
        self.ray.on_end = self._actor_ended
        self.faults, self.operator = Faults(self), Operator(self)
        self.world.on_event = self.rules.look
        self.args = args_of(plan)

    def dataset(self) -> Dataset:
        return _dataset()

    @property
    def fleet(self) -> Any:
        """The fleet of the run; None before there is one."""
        manager = self.manager
        return None if manager is None or manager.instance is None else manager.instance.real._fleet

    @property
    def manager(self) -> Actor | None:
        """The rollout manager, or the one that was lost last."""
        managers = [actor for actor in self.ray.actors[self._first :] if actor.name.startswith(MANAGER)]
        return managers[-1] if managers else None

    def fleet_engines(self) -> list[Any]:
        """The engines of the fleet, as it knows them."""
        models = [] if self.fleet is None else self.fleet.models.values()
        return [engine for model in models for engine in model.engines]

    def joins(self, server: EngineServer) -> bool:
        """Whether an engine joins a run that replaces none, and has not served yet."""
        return self.engines[self._first_engine :].index(server) >= self.plan.engines and not server.listed

    def ended_at(self, engine: Any) -> float:
        """Returns when the process of an engine of the fleet has ended."""
        return engine.handle.actors[0]._actor.instance.server.ended_at

    def serving(self) -> list[Any]:
        return [engine for engine in self.fleet_engines() if engine.state is EngineState.SERVING]

    _first = _first_engine = 0  # of the actors, and of the engines, of this life

    def live(self) -> None:
        """The run, and another one after a crash."""
        if self.plan.crash_after is not None:
            self._one_life(self.plan.crash_after)
            if self.outcome:
                return
            self._crash()
        self._one_life(None)

    def _one_life(self, seconds: float | None) -> None:
        ended = Event(self.world)

        def body() -> None:
            try:
                self._run()
            finally:
                ended.set()

        self.world.spawn("run", body, process="run")
        ended.wait(seconds)

    def _crash(self) -> None:
        self.world.note("the whole run is killed")
        self.resumed = True
        for process in ("run", "manager loop"):
            self.world.kill(process)
        for actor in self.ray.actors:
            actor.die()
        self.router.die("is killed")
        self.world.sleep(1.0)
        self._begin_again()

    def _actor_ended(self, actor: Actor) -> None:
        """What runs in the process of the rollout manager ends with it, and the next one begins anew."""
        if actor.name.startswith(MANAGER):
            self.left_behind = [engine for engine in self.engines if engine.alive]
            self.rules.manager_ended()
            self.world.kill("manager loop")
            self.modules.forget_loop()
            reset_process()

    def _begin_again(self) -> None:
        """The new processes know nothing of the old ones."""
        self._first, self._first_engine, self.rollout = len(self.ray.actors), len(self.engines), None
        self.modules.forget_loop()
        self.gloo.__init__(self)  # type: ignore[misc]
        self.operator.forget()
        reset_process()
        found = self.disk.checkpoint()
        if found is None:
            self.rules.resumes(None, 0)
        else:
            self.rules.resumes(found[0], found[2]["weight_version"])

    def _run(self) -> None:
        try:
            self._train()
        except Exception as error:
            self.outcome = f"{type(error).__name__}: {error}"
            self.world.note(f"ended by {self.outcome[:300]}")
            self._judge(error)
        else:
            self.outcome = "trained"

    def _judge(self, error: Exception) -> None:
        """Faults that nobody promises to survive may end a run, and by name; bugs may not."""
        told = str(error)
        is_bug = isinstance(error, BUGS) or "LedgerError" in told or "IllegalState" in told
        if is_bug or not self.faults.excuse:
            found = error if isinstance(error, Violation) else Violation(f"ended by {self.outcome}")
            found.__cause__ = found.__cause__ or (None if found is error else error)
            self.world.fail_with(found)

    def _train(self) -> None:
        config = run_config(copied(self.args))
        log = WatchedLog(Tracker([]))
        slots = Slots(self.plan.engines + self.plan.spare)
        rollout = RolloutGroup(config, slots, self.plan.ranks, log, needs_offload=False)
        self.rollout = rollout
        critic = RayTrainGroup(config, Slots(0), rollout, log, role="critic")
        actor = WatchedGroup(config, Slots(self.plan.ranks), rollout, log)
        loop = asynchronous if self.plan.asynchronous else synchronous
        try:
            rollout.wait_ready()
            critic.wait_ready()
            actor.wait_ready()
            rollout.load(actor.start_rollout_id - 1)
            loop.train(config, actor, critic, rollout, log)
            fully_async_rollout.stop_worker()
            self.rules.ended()
        finally:
            actor.shutdown()
            rollout.shutdown()
        self.rules.stopped()


@functools.cache
def _dataset() -> Dataset:
    directory = Path(tempfile.mkdtemp(prefix="slime-simulation-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    file = directory / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"q{n}", "label": "a"}) + "\n" for n in range(7)))
    return Dataset(str(file), None, prompt_key="prompt", label_key="label", seed=1)  # type: ignore[arg-type]


def reset_process() -> None:
    """What a process of its own would begin with."""
    GenerateState.clear()
    clock.__init__()  # type: ignore[misc]
    fully_async_rollout._worker = None
    engine_count.__init__()  # type: ignore[misc]
    background_generation.__init__()  # type: ignore[misc]


@dataclass(frozen=True)
class History:
    """What has become of a seed."""

    plan: Plan
    digest: str
    outcome: str
    events: int
    seconds: float
    faults: int
    router_faults: int
    manager_faults: int
    drained: int
    added: int
    resumed: bool
    lines: list[str]


class Found(AssertionError):
    """A history in which something happened that must not.

    Attributes:
        lines: its trace, if it was kept.
    """

    def __init__(self, plan: Plan, error: BaseException, lines: list[str], digest: str) -> None:
        super().__init__(
            f"seed {plan.seed}: {error}\n"
            f"again, with its trace: python benchmarks/simulate.py --seed {plan.seed}"
        )
        self.seed, self.lines, self.digest, self.reason = plan.seed, lines, digest, str(error)


def play(seed: int, traced: bool = False) -> History:
    """Plays the history of a seed.

    Raises:
        Found: an invariant does not hold; names the seed, and how to see it again.
    """
    return play_plan(draw(seed), traced)


def play_plan(
    plan: Plan, traced: bool = False, change: Callable[[Simulation], None] = lambda sim: None
) -> History:
    """Plays the history of a plan.

    Args:
        change: made before it begins.
    """
    reset_process()
    logging.disable(logging.CRITICAL)
    sim = Simulation(plan)
    WatchedGroup.sim = WatchedLog.sim = sim
    change(sim)
    if traced:
        sim.world.keep_trace()
    try:
        with in_place(sim):
            init_http_client(sim.args)
            sim.faults.begin()
            sim.operator.begin()
            try:
                sim.world.run(sim.live)
            finally:
                sim.modules.close()
    except Exception as error:
        raise Found(plan, error, sim.world.lines, sim.world.digest) from error
    finally:
        logging.disable(logging.NOTSET)
        reset_process()
    world = sim.world
    world.note(f"outcome {sim.outcome}")
    return History(
        plan,
        world.digest,
        sim.outcome,
        world.events,
        world.now,
        sim.faults.engines,
        sim.faults.routers,
        sim.faults.managers,
        sim.operator.drained,
        sim.operator.added,
        sim.resumed,
        world.lines,
    )
