"""Bugs planted in the product, one at a time: a simulator that does not find them proves nothing.

with planted("a group is given out twice"):
    play(seed)
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from slime.backends.sglang_utils.client import EngineClient
from slime.backends.sglang_utils.router import RouterProcess
from slime.ray import engine_starts, membership
from slime.ray.engine import Engine, EngineState
from slime.ray.engine_group import EngineGroup
from slime.ray.engine_starts import EngineStarts
from slime.ray.engine_watch import EngineWatch
from slime.ray.fleet import Fleet
from slime.ray.members import KeptMembers, Members
from slime.ray.membership import Membership
from slime.ray.model_engines import ModelEngines
from slime.ray.pending_rollout import PendingRollout
from slime.ray.rollout_group import RolloutGroup
from slime.ray.rollout_manager import RolloutManager
from slime.ray.served_model import ServedModel
from slime.ray.train_group import RayTrainGroup
from slime.ray.train_worker import TrainWorker
from slime.rollout.async_worker import AsyncRolloutWorker
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.ledger import RolloutAccount
from slime.utils.weight_clock import WeightClock
from slime.weight_sync.agreement import RankAgreement
from slime.weight_sync.transports.session import EngineClients, SessionTransport
from slime.weight_sync.update import Route

Wrap = Callable[[Any], Any]
"""Takes what is there, and returns what is put in its place."""


@dataclass(frozen=True)
class Bug:
    """A change of one name of the product."""

    owner: Any
    name: str
    wrap: Wrap


def _admitted_too_early(real: Any) -> Any:
    def replace_gone(self: Fleet, model: ServedModel) -> None:
        real(self, model)
        for engine in model.living:
            if engine.state is EngineState.READY:
                model.admit(engine)

    return replace_gone


def _replacements_left_out(real: Any) -> Any:
    def admit(self: ServedModel, engine: Engine) -> None:
        if not self.replaced:
            real(self, engine)

    return admit


def _goes_on_watching(real: Any) -> Any:
    @contextmanager
    def serving(self: Fleet) -> Iterator[None]:
        self.check()
        self._watch.resume()
        yield

    return serving


def _only_serving(real: Any) -> Any:
    def endpoints_of(self: Fleet, policy: str) -> Any:
        engines = [engine for model in self._updated_by(policy) for engine in model.living]
        return [engine.endpoint for engine in engines if engine.state is EngineState.SERVING]

    return endpoints_of


def _without_looking_at_versions(real: Any) -> Any:
    def admit(self: Fleet, version: str, policy: str) -> None:
        for model in self._updated_by(policy):
            for engine in model.living:
                if engine.state is EngineState.READY:
                    model.admit(engine)

    return admit


def _dead_or_gone(real: Any) -> Any:
    def replace_gone(self: EngineGroup) -> list[Engine]:
        for engine in self.engines:
            if engine.state is EngineState.DEAD:
                engine.gone.set()
        return real(self)

    return replace_gone


def _twice(real: Any) -> Any:
    def give_back(self: RolloutAccount, groups: list[Any], taken: list[Any] | None = None) -> None:
        real(self, groups, taken)
        self._source.add_samples(groups[:1])

    return give_back


def _still_there(real: Any) -> Any:
    def pop_returned(self: RolloutDataSource, num_samples: int) -> list[Any]:
        groups = self._returned[:num_samples]
        self.ledger.fetch(len(groups))
        return groups

    return pop_returned


def _without_leases(real: Any) -> Any:
    def state_dict(self: RolloutDataSource) -> dict[str, Any]:
        return real(self) | {"leased": []}

    return state_dict


def _without_deadline(real: Any) -> Any:
    def init(self: EngineClient, endpoint: Any, timeout: float = 0.0) -> None:
        real(self, endpoint, math.inf)

    return init


def _health_without_deadline(real: Any) -> Any:
    def status(self: EngineClient, path: str, timeout: float) -> int | None:
        return real(self, path, math.inf)

    return status


def _back_to_one(real: Any) -> Any:
    def update_weights(self: TrainWorker) -> Any:
        if self._weight_version == 2:
            self._weight_version = 0
        return real(self)

    return update_weights


def _after_a_failure_too(real: Any) -> Any:
    def update_weights(self: TrainWorker) -> Any:
        self._weight_version += 1
        version, report = self._weight_version, self._update.run(self._weight_version)  # type: ignore[union-attr]
        self._trained_since_update = False
        return version - (version > 2), report

    return update_weights


def _nothing(real: Any) -> Any:
    return lambda self, *arguments, **options: None


def _all_but_the_last(real: Any) -> Any:
    def resume(self: SessionTransport) -> None:
        for client in self._engines.clients[:-1] or self._engines.clients:
            client.continue_generation()
        self._check_pending = self._is_open = False

    return resume


def _goes_on_before_the_end(real: Any) -> Any:
    def commit(self: Route) -> None:
        self.resume()
        real(self)

    return commit


def _first_alone(real: Any) -> Any:
    def each(self: EngineClients, request: Any) -> list[Any]:
        clients, self.clients = self.clients, self.clients[:1]
        try:
            return real(self, request)
        finally:
            self.clients = clients

    return each


def _left_open(real: Any) -> Any:
    def connect(self: SessionTransport, endpoints: Any) -> None:
        self._is_open = False
        real(self, endpoints)

    return connect


def _booked_twice(real: Any) -> Any:
    def train(self: RolloutAccount, group: list[Any]) -> None:
        real(self, group)
        self._ledger.issued += 1
        self._ledger.trained += 1

    return train


def _without_others(real: Any) -> Any:
    @contextmanager
    def step(self: RankAgreement, name: str) -> Iterator[None]:
        yield

    return step


def _nobody_told(real: Any) -> Any:
    def end_update(self: WeightClock, version: int) -> None:
        self._waiting = []
        real(self, version)

    return end_update


def _ahead_forgotten(real: Any) -> Any:
    def age(self: WeightClock, version: int | None) -> int:
        return 0 if version is None or self.version is None else self.version - version

    return age


def _handed_out_again(real: Any) -> Any:
    def hand_out(self: AsyncRolloutWorker, count: int) -> list[list[Any]]:
        works = self._done[:count]
        groups = real(self, count)
        self._done += works[:1]
        return groups

    return hand_out


def _never_again(real: Any) -> Any:
    def update(self: RayTrainGroup) -> None:
        engines = self._rollout.updatable_engines()
        if engines[0]:
            self._rollout.weights_updated(self._send_weights(engines))

    return update


def _raised(real: Any) -> Any:
    def bury(model: ServedModel, failures: Any, error: Exception) -> None:
        raise error

    return bury


def _alive_or_not(real: Any) -> Any:
    def let_serve(self: Fleet, model: ServedModel, engine: Engine) -> None:
        if engine.joins:
            real(self, model, engine)
        else:
            model.admit(engine)

    return let_serve


def _never(real: Any) -> Any:
    return lambda self: False


def _by_address(real: Any) -> Any:
    """Reconnects only where addresses have changed: a replacement may have its predecessor's."""

    def send(self: RayTrainGroup, engines: Any) -> int:
        if self._connected and engines[0] == self._connected[0]:
            self._connected = engines
        return real(self, engines)

    return send


def _at_once(real: Any) -> Any:
    def start(self: Membership, model: ServedModel, engine: Engine) -> None:
        real(self, model, engine)
        if engine.state is EngineState.READY:
            model.take_in(engine)
            model.admit(engine)

    return start


def _into_the_update(real: Any) -> Any:
    def start(self: Membership, model: ServedModel, engine: Engine) -> None:
        real(self, model, engine)
        if engine.state is EngineState.READY:
            model.take_in(engine)

    return start


def _still_waiting(real: Any) -> Any:
    def take_in(self: EngineGroup, joiner: Engine) -> None:
        before = self.joiners
        real(self, joiner)
        self.joiners = before

    return take_in


def _of_engines_alone(real: Any) -> Any:
    def free_ranks(self: EngineGroup) -> list[int]:
        joiners, self.joiners = self.joiners, []
        try:
            return real(self)
        finally:
            self.joiners = joiners

    return free_ranks


def _as_any_other(real: Any) -> Any:
    def join(self: EngineGroup, rank: int) -> Engine:
        engine = real(self, rank)
        engine.joins = False
        return engine

    return join


def _still_routed(real: Any) -> Any:
    def drain(self: Membership, model: ServedModel, engine: Engine, seconds: float) -> None:
        self._await_answers(engine, seconds)
        self._let_go(model, engine)

    return drain


def _with_those_that_leave(real: Any) -> Any:
    def members(self: Membership) -> Members:
        engines = [engine for model in self._models.values() for engine in model.engines]
        return replace(real(self), places=frozenset(engine.rank for engine in engines))

    return members


def _without_joiners(real: Any) -> Any:
    def members(self: Membership) -> Members:
        return replace(real(self), joining=frozenset())

    return members


def _without_notices(real: Any) -> Any:
    def members(self: Membership) -> Members:
        return replace(real(self), notices={})

    return members


BUGS: dict[str, tuple[Bug, ...]] = {
    "an engine is admitted before it has weights": (Bug(Fleet, "_replace_gone", _admitted_too_early),),
    "an engine that joins serves the weights that it was started with": (
        Bug(Fleet, "endpoints_of", _only_serving),
        Bug(Fleet, "admit", _without_looking_at_versions),
    ),
    "an engine starts before its predecessor has ended": (
        Bug(EngineStarts, "await_ends", _nothing),
        Bug(EngineGroup, "replace_gone", _dead_or_gone),
    ),
    "a dead engine stays in the router": (Bug(ServedModel, "dismiss", _nothing),),
    "a group that comes back is put into the buffer twice": (Bug(RolloutAccount, "give_back", _twice),),
    "a group that was returned is given out again and again": (
        Bug(RolloutDataSource, "_pop_returned", _still_there),
    ),
    "groups that are out are not saved": (Bug(RolloutDataSource, "state_dict", _without_leases),),
    "a finished group is handed out twice": (Bug(AsyncRolloutWorker, "_hand_out", _handed_out_again),),
    "requests to engines have no deadline": (Bug(EngineClient, "__init__", _without_deadline),),
    "health checks have no deadline": (Bug(EngineClient, "_status", _health_without_deadline),),
    "the version of the weights falls": (Bug(TrainWorker, "update_weights", _back_to_one),),
    "the version that is told is not the one that was sent": (
        Bug(TrainWorker, "update_weights", _after_a_failure_too),
    ),
    "an engine stays paused after an update": (Bug(SessionTransport, "resume", _all_but_the_last),),
    "an update is never closed": (Bug(SessionTransport, "commit", _nothing),),
    "engines go on before the update is closed": (Bug(Route, "commit", _goes_on_before_the_end),),
    "engines are not paused for an update": (Bug(EngineClient, "pause_generation", _nothing),),
    "control requests reach the first engine alone": (Bug(EngineClients, "each", _first_alone),),
    "ranks do not agree on failures": (Bug(RankAgreement, "step", _without_others),),
    "an update that an engine's death interrupts is not begun again": (
        Bug(RayTrainGroup, "_update_weights", _never_again),
    ),
    "a replacement at the same address is not connected": (Bug(RayTrainGroup, "_send_weights", _by_address),),
    "who waits for the end of an update is not told": (Bug(WeightClock, "end_update", _nobody_told),),
    "updates ahead do not make a group older": (Bug(WeightClock, "age", _ahead_forgotten),),
    "deaths are not looked for before an update": (Bug(Fleet, "recover", _nothing),),
    "health is not checked": (Bug(EngineWatch, "_begin_checks", _nothing),),
    "health is checked while weights are sent": (Bug(Fleet, "serving", _goes_on_watching),),
    "a replacement never serves": (Bug(ServedModel, "admit", _replacements_left_out),),
    "an update that was interrupted is not closed": (Bug(SessionTransport, "connect", _left_open),),
    "what older weights have computed is kept": (Bug(SessionTransport, "_flush", _nothing),),
    "a router that has ended is not started again": (Bug(EngineWatch, "_look_at_router", _nothing),),
    "a router that hangs is waited for": (Bug(RouterProcess, "_hangs", _nothing),),
    "a new router is not told of the engines that serve": (Bug(ServedModel, "_list_again", _nothing),),
    "an engine that hangs in an update is not given up": (Bug(EngineWatch, "probe", _nothing),),
    "a replacement that ends while it starts ends the run": (Bug(engine_starts, "_bury", _raised),),
    "a replacement that ends while the router is told of it ends the run": (
        Bug(Fleet, "_let_serve", _alive_or_not),
    ),
    "a lost rollout manager is not started again": (Bug(RolloutGroup, "may_restart", _never),),
    "a new rollout manager begins the data anew": (Bug(RolloutManager, "restore", _nothing),),
    "a new rollout manager goes back to the data of the first step": (
        Bug(RolloutGroup, "end_step", _nothing),
    ),
    "a new rollout manager starts the engines of the first one": (Bug(KeptMembers, "now", _nothing),),
    "a new rollout manager starts engines that were leaving": (
        Bug(Membership, "members", _with_those_that_leave),
    ),
    "a new rollout manager forgets who was about to join": (Bug(Membership, "members", _without_joiners),),
    "a new rollout manager forgets which places are taken away": (
        Bug(Membership, "members", _without_notices),
    ),
    "a rollout that its manager did not finish is waited for": (Bug(PendingRollout, "lose", _nothing),),
    "the last engine may leave": (Bug(membership, "require_others", _nothing),),
    "engines leave within an update": (Bug(Membership, "begin_update", _nothing),),
    "an engine that leaves stays in the router": (Bug(Membership, "_drain", _still_routed),),
    "an engine that has left is still one of the fleet": (Bug(ModelEngines, "let_go", _nothing),),
    "who is to leave after an update does not": (Bug(Membership, "end_update", _nothing),),
    "an engine that joins serves before it has weights": (Bug(Membership, "_start", _at_once),),
    "an engine joins within an update": (Bug(Membership, "_start", _into_the_update),),
    "an engine that joins is counted twice": (Bug(EngineGroup, "take_in", _still_waiting),),
    "a place is given twice": (Bug(EngineGroup, "free_ranks", _of_engines_alone),),
    "an engine that has started never joins": (Bug(Membership, "_take_in", _nothing),),
    "the death of one that joins ends the run": (Bug(EngineGroup, "join", _as_any_other),),
    "an engine starts on a place that is to be taken away": (Bug(EngineGroup, "withhold", _nothing),),
    "a group is booked twice": (Bug(RolloutAccount, "train", _booked_twice),),
}
"""What is wrong, and the names that are changed for it."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Has the bug in the product, and nothing of it left at the end."""
    before = [(bug, vars(bug.owner)[bug.name]) for bug in BUGS[name]]
    for bug, real in before:
        setattr(bug.owner, bug.name, bug.wrap(real))
    try:
        yield
    finally:
        for bug, real in before:
            setattr(bug.owner, bug.name, real)
