"""One model of the fleet: its engines, and the router in front of them."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from slime.backends.sglang_utils.router import Router, RouterError
from slime.ray.engine import Engine, EngineState
from slime.ray.engine_group import EngineGroup
from slime.ray.model_engines import ModelEngines
from slime.ray.registration import end_of, hangs, refused, require_alive_if_it_joins, takes

logger = logging.getLogger(__name__)

ROUTER_RESTARTS = 5  # of one router in one rollout or evaluation
_RESTART_PAUSE = 1.0  # seconds after a start that failed
_LISTED_AT_ONCE = 64  # engines
_DEATH_NOTICE = 10.0  # seconds until a router that gave no answer is seen to have ended, on a busy machine


class ServedModel(ModelEngines):
    """Engines that serve the same model behind one router.

    Args:
        start_router: starts it, each time at the same address, and returns when it answers.
        takes_updates: whether the trainer's weights go to the engines.
        policy: of which model these are, where several are trained; by default that of this name.
        update_interval: rollouts for which it keeps an earlier version of them; None where it takes each.
        evaluates: whether it keeps the weights of an evaluation that goes on beside training: it takes an
            update when one is `wanted`, and its dead engines wait for that.
        waits_for_weights: whether nothing reaches the engines before they were given weights. What they hold
            at the start may be anything where somebody else has started them.
        router_restarts: how often in one rollout a router that has ended is started again.

    Attributes:
        router: the one that runs; another one after a restart.
        version: of the weights that the engines were last found to have; None before.
        wanted: of one that evaluates, whether it takes the next update; the first one it does.
        unlisted: engines that serve, and gave no answer when a new router was told of them.
    """

    def __init__(
        self,
        name: str,
        groups: Sequence[EngineGroup],
        start_router: Callable[[], Router],
        *,
        takes_updates: bool = True,
        policy: str | None = None,
        update_interval: int | None = None,
        evaluates: bool = False,
        waits_for_weights: bool = False,
        router_restarts: int = 0,
    ) -> None:
        super().__init__(groups)
        self.name, self.takes_updates, self.waits_for_weights = name, takes_updates, waits_for_weights
        self.policy, self.update_interval = policy or name, update_interval
        self.evaluates = self.wanted = evaluates
        self.version: str | None = None
        self._since: int | None = None  # the first rollout with this version; None before it
        self._start_router = start_router
        self.router: Router | None = None
        self._most_restarts, self._restarts = router_restarts, 0
        self._restarting = threading.Lock()
        self._changing = threading.Lock()  # which router there is, and which engines serve behind it
        self._listing = threading.RLock()  # whose address it is that a router is told of
        self.unlisted: set[Engine] = set()
        self._stopped = False

    @property
    def is_lost(self) -> bool:
        """Whether none of its engines lives or starts, and none will before the next weight update.

        Rollouts go on without one that evaluates.
        """
        dead = self.dead
        waits = self.evaluates and not self.wanted
        none_left = dead and not self.living and not self.starting
        return bool(none_left) and not (waits or self.restarts_alone(dead[0]))

    @property
    def keeps_versions(self) -> bool:
        """Whether it may have earlier weights than the trainer's latest."""
        return self.evaluates or self.update_interval is not None

    def counts(self) -> dict[str, int]:
        """How many of its engines live, are missing and were replaced; of an earlier version which it is."""
        missing = len(self.dead) + len(self.starting)
        counts = {"engines": len(self.living), "missing": missing, "replaced": self.replaced}
        if self.keeps_versions and self.version is not None:
            counts["weight_version"] = int(self.version)
        return counts

    def restarts_alone(self, engine: Engine) -> bool:
        """Whether another one may take its place at once: it needs no weights and no GPU of the trainer's."""
        return not self.takes_updates and not engine.is_colocated

    def launch(self, ranks: Collection[int] | None = None) -> None:
        """Begins to start all engines, or those of these numbers, then starts the router."""
        for group in self._groups:
            group.launch(ranks)
        self.router = self._start_router()

    def admit(self, engine: Engine) -> None:
        """Lets requests through to an engine that is ready, unless it dies meanwhile.

        Raises:
            RouterError: the router does not take it, or has ended for good.
        """
        while not self._is_admitted(engine):
            pass

    def _is_admitted(self, engine: Engine) -> bool:
        """False if another router has meanwhile taken the place of the one that was told."""
        router = self.router
        assert router is not None, f"model {self.name} has not been launched"
        serves: bool | None = None
        with self._listing:
            refusal = refused(router, engine)
            if refusal is None or engine.state is EngineState.DEAD:
                require_alive_if_it_joins(engine)
                refusal, serves = None, self._serves_behind(router, engine)
        if refusal is not None and not self.restart_router(router, _DEATH_NOTICE):
            raise refusal
        if serves is None:
            return False
        if not serves:
            # Whoever found it dead may have asked the router before it was listed there.
            self.dismiss(engine)
        return True

    def _serves_behind(self, router: Router, engine: Engine) -> bool | None:
        """Has it serve unless it is dead; None if another router has taken the place of this one."""
        with self._changing:
            return engine.become(EngineState.SERVING) if self.router is router else None

    def dismiss(self, engine: Engine) -> None:
        """Takes an engine that is dead out of the router; a new router has never had it.

        Raises:
            RouterError: the router keeps it, or has ended for good.
        """
        router = self.router
        if router is None:
            return
        try:
            router.remove_worker(engine.url)
        except RouterError:
            if not self.restart_router(router, _DEATH_NOTICE):
                raise

    def is_due(self, rollout_id: int) -> bool:
        """Whether it takes the weights that the trainer has before a rollout.

        An engine that was started meanwhile cannot be given earlier ones: all of the model take these then.
        """
        if self.evaluates:
            return self.wanted
        if self.update_interval is None or self._since is None:
            return True
        is_new = any(engine.state is EngineState.READY for engine in self.living)
        return is_new or rollout_id // self.update_interval > self._since // self.update_interval

    def updated(self, version: str) -> None:
        """Takes note that all its engines have this version."""
        self.version, self._since = version, None

    def serve_rollout(self, rollout_id: int) -> None:
        """Takes note that its version takes part in a rollout."""
        self.wanted = False
        self._since = rollout_id if self._since is None else self._since

    def begin_rollout(self) -> None:
        """Forgets the restarts of the router so far."""
        self._restarts = 0

    def restart_router(self, ended: Router, notice: float = 0.0) -> bool:
        """Starts another router in place of one that has ended, with all engines that serve.

        Args:
            notice: seconds to wait for its end to be seen.

        Returns:
            Whether another one is in its place; False if it runs.

        Raises:
            RouterError: it may not be started again, or not that often.
        """
        with self._restarting:
            if self.router is not ended:
                return True
            reason = end_of(ended, notice if self._most_restarts else 0.0)
            if reason is None:
                return False
            while (reason := self._failed_restart(reason)) is not None:
                time.sleep(_RESTART_PAUSE)
            return True

    def _failed_restart(self, reason: str) -> str | None:
        """Tries once, after a router that ended for this reason; returns why that failed, if it did."""
        if self._stopped:
            return None
        if self._restarts >= self._most_restarts:
            often = f"{self._restarts} restarts in one rollout did not help: " if self._restarts else ""
            raise RouterError(often + reason)
        self._restarts += 1
        logger.warning("the router of model %s is started again: %s", self.name, reason)
        try:
            if self.router is not None:
                self.router.shutdown()  # of one that is stopped there is something left
            self._replace_router()
        except RouterError as error:
            return str(error)
        return None

    def _replace_router(self) -> None:
        router = self._start_router()
        with self._changing:
            self.router = router
            serving = [engine for engine in self.engines if engine.state is EngineState.SERVING]
            stopped = self._stopped
        if stopped:
            router.shutdown()
            return
        # One that hangs takes a minute; the others would wait behind it, and requests for any at all.
        with ThreadPoolExecutor(_LISTED_AT_ONCE, thread_name_prefix="engine-list") as pool:
            list(pool.map(lambda engine: self._list_again(router, engine), serving))

    def list_missing(self) -> None:
        """Tells the router of `unlisted` engines that answer by now; RouterError if it refuses one."""
        for engine in list(self.unlisted):
            if engine.state is not EngineState.SERVING:
                self.unlisted.discard(engine)
            elif not hangs(engine):
                with self._restarting:
                    if self.router is not None and engine in self.unlisted:
                        self._list_again(self.router, engine)

    def _list_again(self, router: Router, engine: Engine) -> None:
        """Tells a new router of an engine that served behind the one before, unless it has ended.

        One that hangs is no reason for another router: who waits for it finds it dead.
        """
        taken = takes(router, engine)
        if engine.lives:
            (self.unlisted.discard if taken else self.unlisted.add)(engine)
            return
        with self._listing:
            serving = [other.url for other in self.engines if other.state is EngineState.SERVING]
            if engine.url not in serving:  # else it is its successor's address
                router.remove_worker(engine.url)

    def stop_router(self) -> None:
        with self._changing:
            self._stopped, router = True, self.router
        if router is not None:
            router.shutdown()
