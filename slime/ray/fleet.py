"""All models that a run serves: their engines, and the routers in front of them."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from slime.backends.sglang_utils.router import RouterError
from slime.config.fleet import FleetConfig
from slime.config.served_models import DEFAULT
from slime.ray.control_requests import ControlRequests
from slime.ray.engine import Engine, EngineState
from slime.ray.engine_scaling import EngineScaling
from slime.ray.engine_starts import START_ERRORS, EngineStarts
from slime.ray.engine_watch import EngineFailure, EngineWatch, WatchTimes
from slime.ray.members import Members
from slime.ray.membership import Membership
from slime.ray.membership_checks import refusal_of
from slime.ray.policies import policy_configs
from slime.ray.process_watch import ProcessLocation
from slime.ray.served_model import ServedModel
from slime.ray.served_policy import log_probs_of, require_same_policy
from slime.utils.engine_count import engine_count
from slime.utils.types import EngineEndpoint

logger = logging.getLogger(__name__)
LOOK_AGAIN = 0.2  # seconds between two looks for a death that is suspected
ENDED_AT_ONCE = 64  # engines
MAX_RESTARTS = 5  # of an engine that waits for no weight update, in one rollout or evaluation


class Fleet:
    """Starts, watches, replaces and stops the engines of every model.

    With ``--use-fault-tolerance`` a dead engine leaves its router at once, and ``recover`` starts a new
    one, which serves only after ``admit``: after it has been given current weights. A router that has ended
    is started again. Without the flag any death is a failure, which ``check`` raises.

    ``start``, ``recover``, ``admit``, ``release`` and ``resume`` are called one at a time, the others at any
    time.

    Attributes:
        membership: by which engines leave and join at anybody's request.
    """

    def __init__(
        self, config: FleetConfig, models: Sequence[ServedModel], former: Members | None = None
    ) -> None:
        self._config = config
        self.models = {model.name: model for model in models}
        faults, starts = config.fault_tolerance, config.cluster.engine_startup_timeout
        times = WatchTimes(
            interval=faults.rollout_health_check_interval,
            timeout=faults.rollout_health_check_timeout,
            first_wait=faults.rollout_health_check_first_wait,
            hang=faults.rollout_engine_hang_timeout,
        )
        tolerant = faults.use_fault_tolerance
        self._watch = EngineWatch(models, times, tolerant=tolerant, on_gone=self._restart_alone)
        limits = {"start_timeout": starts, "silence": times.timeout if tolerant else times.hang}
        self.membership = Membership(self.models, refusal_of(config), **limits, former=former)
        self._scaling = EngineScaling(config.engines, models, self.membership)
        self._controls = ControlRequests(self._watch, self._may_die)
        self._replacing = threading.Lock()
        self._starts = EngineStarts(starts)
        self._restarts: Counter[int] = Counter()
        self._next_rollout = 0
        self._left: set[Engine] = set()  # the dead whose places could not be filled

    @property
    def urls(self) -> list[str]:
        """The URLs of all living engines."""
        return [engine.url for model in self.models.values() for engine in model.living]

    @property
    def gpus(self) -> int:
        """How many GPUs all engines have, the dead ones among them."""
        engines = [engine for model in self.models.values() for engine in model.engines]
        return sum(engine.endpoint.num_gpus for engine in engines if engine.has_started)

    def answering(self) -> int:
        """How many engines of the first model, or of all policies, serve now."""
        names = [*self._config.policies.trained_policies] or [*self.models][:1]
        engines = [engine for name in names for engine in self.models[name].engines]
        return sum(engine.state is EngineState.SERVING for engine in engines)

    def metrics(self) -> dict[str, int]:
        """How many engines of each model live, how many it misses, and how many were replaced so far.

        Nothing for a single model before one of its engines has died, or has left.
        """
        if len(self.models) == 1 and not any(model.has_changed for model in self.models.values()):
            return {}
        return {
            f"fleet/{name}/{what}": count
            for name, model in self.models.items()
            for what, count in model.counts().items()
        }

    def endpoints_of(self, policy: str = DEFAULT) -> list[EngineEndpoint]:
        """The endpoints of the living engines that take the next update of a policy."""
        return [engine.endpoint for model in self._due(policy) for engine in model.living]

    def launches_of(self, policy: str = DEFAULT) -> int:
        """Engines that take a policy's updates started so far: a replacement may have the same address."""
        return sum(model.launches for model in self._updated_by(policy))

    def begin_rollout(self, rollout_id: int) -> None:
        """Takes note of which rollout is made with the weights that the engines have."""
        self._next_rollout = rollout_id + 1
        for model in self.models.values():
            model.serve_rollout(rollout_id)

    def processes(self) -> list[tuple[str, ProcessLocation]]:
        """Name and place of the processes of engines that are ours to end."""
        engines = [engine for model in self.models.values() for engine in model.living]
        engines += [*self.membership.leaving, *self.membership.waiting]
        return [(str(engine), place) for engine in engines for place in engine.handle.processes()]

    def start(self) -> None:
        """Launches everything at once, and returns when engines that wait for no weights are routed to."""
        self.membership.launch()
        for model in self.models.values():
            model.wait_ready(self._config.cluster.engine_startup_timeout)
            for engine in model.living:
                if not model.waits_for_weights:
                    self._let_serve(model, engine)
                if model.takes_updates and self._config.weight_sync.check_weight_update_equal:
                    # Now, as an engine that shares GPUs gives its weights away before the first update.
                    engine.client.weights_checker("snapshot")
        engine_count.follow(self.answering)
        self._watch.start()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Has engines watched while they generate: they must also answer; raises a failure found before."""
        self.check()
        self._restarts.clear()
        for model in self.models.values():
            model.begin_rollout()
        self._watch.resume()
        try:
            self._require_engines()
            with self._scaling.while_generating():
                yield
        finally:
            self._watch.pause()

    @property
    def tolerates(self) -> bool:
        """Whether there are engines whose death does not end the run."""
        joins = any(engine.joins for model in self.models.values() for engine in model.engines)
        return joins or self._config.fault_tolerance.use_fault_tolerance

    def check(self) -> None:
        """Raises what the watch has found to end the run, if anything."""
        self._watch.check()

    def recover(self, timeout: float = 0.0) -> None:
        """Starts a replacement for every engine that died and had served; they do not serve yet.

        Args:
            timeout: seconds to wait for a death that is suspected; an engine that hangs is found then, too.

        Raises:
            EngineFailure: a model has no engine, or replacements of one ended again and again.
        """
        # The watch's next look may come too late for one that has just died.
        self._watch.look()
        self._await_a_death(timeout)
        if timeout and not self._has_new_death():
            self._watch.probe()
        self.check()
        self._starts.await_ends([engine for model in self.models.values() for engine in model.dead])
        self.check()
        for model in self.models.values():
            self._replace_gone(model)
        self._left = {engine for model in self._updated for engine in model.dead}
        self._require_engines()

    def admit(self, version: str, policy: str = DEFAULT) -> None:
        """Lets engines that serve ``version`` into their routers; a policy's weights have just been updated.

        Raises:
            EngineFailure: an engine reports another version.
        """
        for model in self._due(policy):
            for engine in model.living:
                found = self._controls.ask(model, engine, lambda client: client.weight_version())
                if found is not None and found != version:
                    raise EngineFailure(
                        f"{engine} serves weight version {found!r}, the trainer sent {version!r}"
                    )
                engine.updated(version)
                if engine.state is EngineState.READY:
                    self._let_serve(model, engine)
            model.updated(version)
        self.membership.end_update()

    def _let_serve(self, model: ServedModel, engine: Engine) -> None:
        """Has an engine routed to, unless it dies just now, which may be tolerated."""
        try:
            model.admit(engine)
        except RouterError:
            if self._may_die(engine):
                self._watch.examine(model, engine)
            if engine.lives or not self._may_die(engine):
                raise

    def _may_die(self, engine: Engine) -> bool:
        return engine.joins or self._config.fault_tolerance.use_fault_tolerance

    def check_policy(
        self,
        tokens: Sequence[int],
        expected: Sequence[float],
        adapter: str | None = None,
        policy: str = DEFAULT,
    ) -> None:
        """Compares what engines with the trainer's weights say of a text with what the trainer says.

        Halves of disaggregated engines answer nothing by themselves, and are not asked.

        Args:
            adapter: with which they compute it; by default that which they have beside the base, if any.

        Raises:
            PolicyMismatch: of the first engine that is too far away.
        """
        adapter = adapter or next(iter(self._config.lora.served_adapters), None)
        config = policy_configs(self._config)[policy]
        for model in self._updated_by(policy):
            for engine in () if model.keeps_versions else model.living:
                if engine.kind != "regular":
                    logger.warning("%s is a %s engine: its policy is not checked", engine, engine.kind)
                    continue
                found = self._controls.ask(
                    model, engine, lambda client: log_probs_of(client, tokens, adapter)
                )
                if found is not None:
                    gap = require_same_policy(config, f"{engine}, model {model.name}", found, expected)
                    logger.info("%s serves the trainer's policy: log-probs %.2g apart", engine, gap)

    def release(self) -> None:
        """Frees the engines' memory for a trainer on the same GPUs."""
        self._controls.ask_colocated(self.models.values(), lambda client: client.release_memory_occupation())

    def resume(self, tags: list[str]) -> None:
        """Takes memory back: "weights", "kv_cache", "cuda_graph"."""
        self._controls.ask_colocated(
            self.models.values(), lambda client: client.resume_memory_occupation(tags)
        )

    def stop(self) -> None:
        """Ends every engine that is ours to end, and the routers."""
        engine_count.forget(self.answering)
        self._scaling.stop()
        self._watch.stop()
        self._starts.stop()
        self.membership.stop()
        engines = [e for model in self.models.values() for e in (*model.engines, *model.joiners)]
        with ThreadPoolExecutor(ENDED_AT_ONCE, thread_name_prefix="engine-end") as pool:
            list(pool.map(Engine.end, engines))
        self.membership.await_end()
        for model in self.models.values():
            model.stop_router()

    @property
    def _updated(self) -> list[ServedModel]:
        return [model for model in self.models.values() if model.takes_updates]

    def _updated_by(self, policy: str) -> list[ServedModel]:
        """The models with a policy's weights: where several are trained, those that are about it."""
        return [model for model in self._updated if policy in (DEFAULT, model.policy)]

    def _due(self, policy: str) -> list[ServedModel]:
        """The models that take the next update of a policy."""
        return [model for model in self._updated_by(policy) if model.is_due(self._next_rollout)]

    def _await_a_death(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not self._has_new_death() and time.monotonic() < deadline:
            time.sleep(LOOK_AGAIN)
            self._watch.look()

    def _has_new_death(self) -> bool:
        return any(engine not in self._left for model in self._updated for engine in model.dead)

    def _require_engines(self) -> None:
        for model in self.models.values():
            if model.is_lost:
                raise EngineFailure(f"model {model.name}: no engine is left")

    def _replace_gone(self, model: ServedModel) -> None:
        """Starts engines in place of those that are gone; they serve at once if they need no update."""
        with self._replacing:
            fresh = self._starts.replacements(model)
        for engine in fresh:
            self._match_offloaded(model, engine)
            if not model.takes_updates:
                self._let_serve(model, engine)

    def _restart_alone(self, model: ServedModel, engine: Engine) -> None:
        """Replaces an engine that waits for no weight update, unless it dies again and again."""
        if not model.restarts_alone(engine):
            return
        self._restarts[engine.rank] += 1
        if self._restarts[engine.rank] > MAX_RESTARTS:
            self._watch.fail(f"{engine} died {MAX_RESTARTS + 1} times in one rollout")
            return
        try:
            self._replace_gone(model)
        except (*START_ERRORS, EngineFailure, RouterError) as error:
            self._watch.fail(f"{engine} died, and none could take its place: {error}")

    def _match_offloaded(self, model: ServedModel, engine: Engine) -> None:
        """Brings a replacement to where the others are during a weight update: weights in, cache out."""
        if self._config.cluster.offload_rollout and engine.is_colocated:
            self._controls.ask(model, engine, lambda client: client.release_memory_occupation())
            self._controls.ask(model, engine, lambda client: client.resume_memory_occupation(["weights"]))
