"""All rollout engines of a run and the router in front of them."""

import logging
import secrets
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from slime.arguments.facts import with_facts
from slime.backends.sglang_utils.client import EngineClient, EngineError
from slime.backends.sglang_utils.health import Check, HealthMonitor
from slime.backends.sglang_utils.router import Router, RouterError, start_router
from slime.ray.engine_actor import spawn_engine_actor
from slime.ray.node import first_port, log_dir, node_host, process_env
from slime.ray.placement_group import Slots
from slime.ray.waiting import DeadlineExceeded, ProcessDied, wait_all, wait_one
from slime.utils.http_utils import find_available_port, is_loopback
from slime.utils.types import EngineEndpoint

logger = logging.getLogger(__name__)

WATCH_INTERVAL = 2.0  # seconds between two looks at every process of the fleet
ROUTER_PORTS = (3000, 1000)
ANSWER_TIMEOUT = 30.0  # seconds that a keeper may take to say whether its server lives


class EngineFailure(RuntimeError):
    """An engine or the router ended while the run needed it."""


@dataclass(eq=False)
class Engine:
    """A running engine: its keeper, and where it serves."""

    rank: int
    actor: Any
    endpoint: EngineEndpoint | None = None
    registered: bool = False

    @property
    def where(self) -> EngineEndpoint:
        assert self.endpoint is not None, f"engine {self.rank} has not started"
        return self.endpoint

    @property
    def url(self) -> str:
        return self.where.url


class EngineFleet:
    """Starts, watches, replaces and stops engines.

    With ``--use-fault-tolerance`` a dead engine leaves the router at once, and ``recover`` starts a
    new one, which serves only after ``admit``: after it has been given current weights. Without the
    flag any death is kept in ``failure``, which ``check`` raises.
    """

    def __init__(self, args: Namespace, slots: Slots, trainer_gpus: int) -> None:
        self._args, self._slots, self._trainer_gpus = args, slots, trainer_gpus
        self._per_engine = args.rollout_num_gpus_per_engine
        self.engines: list[Engine] = []  # replaced, never changed: it is read without the lock
        self.launches = 0  # engines started so far: a replacement may serve at its predecessor's address
        self.router: Router | None = None
        self.failure: EngineFailure | None = None
        self._stop = threading.Event()
        self._lock = threading.RLock()
        self._watcher: threading.Thread | None = None
        self._health = HealthMonitor(
            self._health_checks,
            self._on_sick,
            interval=args.rollout_health_check_interval,
            timeout=args.rollout_health_check_timeout,
            first_wait=args.rollout_health_check_first_wait,
        )

    @property
    def endpoints(self) -> list[EngineEndpoint]:
        return [engine.endpoint for engine in self.engines if engine.endpoint is not None]

    def start(self) -> None:
        """Launches all engines at once, then the router, and waits until every engine is routed to."""
        if not len(self._slots):
            return
        self.engines = [self._spawn(rank) for rank in range(len(self._slots) // self._per_engine)]
        self._wait_ready(self.engines)
        self.router = self._start_router()
        for engine in self.engines:
            self._register(engine)
        self._watcher = threading.Thread(target=self._watch, name="engine-watch", daemon=True)
        self._watcher.start()
        if self._args.use_fault_tolerance:
            self._health.start()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """While engines generate they must also answer, not only live; raises a failure found before."""
        self.check()
        self._health.resume()
        try:
            yield
        finally:
            self._health.pause()

    def check(self) -> None:
        """Raises what the watcher has found, if anything."""
        if self.failure is not None:
            raise self.failure

    def recover(self) -> list[EngineEndpoint]:
        """Starts a replacement for every engine that died; they do not serve yet."""
        with self._lock:
            # The watcher's next look may come too late for one that has just died.
            self._inspect()
            self.check()
            alive = {engine.rank for engine in self.engines}
            missing = [r for r in range(len(self._slots) // self._per_engine) if r not in alive]
            replacements = [self._spawn(rank) for rank in missing]
            self._wait_ready(replacements)
            for engine in replacements:
                self._match_offloaded(engine)
            self.engines = sorted(self.engines + replacements, key=lambda e: e.rank)
        return self.endpoints

    def admit(self, version: str) -> None:
        """Lets engines that serve ``version`` into the router; the weights have just been updated.

        Raises:
            EngineFailure: an engine reports another version.
        """
        for engine in self.engines:
            found = self._ask(engine, EngineClient.weight_version)
            if found is not None and found != version:
                raise EngineFailure(
                    f"engine {engine.rank} ({engine.url}) serves weight version {found!r}, "
                    f"the trainer sent {version!r}"
                )
            with self._lock:
                # Not one that the watcher has found dead meanwhile: nobody would take it out again.
                if engine in self.engines and not engine.registered:
                    self._register(engine)

    def release(self) -> None:
        """Frees the engines' memory for a trainer on the same GPUs."""
        for engine in self._colocated():
            self._ask(engine, lambda client: client.release_memory_occupation())

    def resume(self, tags: list[str]) -> None:
        for engine in self._colocated():
            self._ask(engine, lambda client: client.resume_memory_occupation(tags))

    def stop(self) -> None:
        self._stop.set()
        self._health.stop()
        for engine in self.engines:
            self._end(engine)
        if self.router is not None:
            self.router.shutdown()

    def _colocated(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.where.gpu_offset is not None]

    def _match_offloaded(self, engine: Engine) -> None:
        """Brings a replacement to where the others are during a weight update: weights in, cache out."""
        if self._args.offload_rollout and engine.where.gpu_offset is not None:
            client = EngineClient(engine.where)
            client.release_memory_occupation()
            client.resume_memory_occupation(["weights"])

    def _ask(self, engine: Engine, request: Callable[[EngineClient], Any]) -> Any:
        """The answer to a control request; None from an engine that has died, if that is tolerated."""
        try:
            return request(EngineClient(engine.where))
        except EngineError as error:
            if error.status is not None or not self._args.use_fault_tolerance:
                raise
            with self._lock:
                if engine in self.engines:
                    self._on_death(engine, str(error))
            return None

    def _spawn(self, rank: int) -> Engine:
        first = rank * self._per_engine
        colocated = self._args.colocate and first < self._trainer_gpus
        actor = spawn_engine_actor(
            self._args,
            rank,
            process_env(),
            self._slots.strategy(first),
            api_key=self._args.sglang_api_key,
            gpu_offset=first if colocated else None,
            base_gpu_id=self._slots.gpu_ids[first],
        )
        self.launches += 1
        return Engine(rank, actor)

    def _start_router(self) -> Router:
        args = self._args
        return start_router(
            args,
            host=args.sglang_router_ip,
            port=args.sglang_router_port,
            prometheus_port=find_available_port(args.sglang_router_port + 1000),
            log_path=log_dir() / "router.log",
            api_key=args.sglang_api_key,
        )

    def _wait_ready(self, engines: list[Engine]) -> None:
        timeout = self._args.engine_startup_timeout
        refs = [engine.actor.wait_ready.remote(timeout) for engine in engines]
        endpoints = wait_all(refs, "start of the rollout engines", timeout + ANSWER_TIMEOUT)
        for engine, endpoint in zip(engines, endpoints, strict=True):
            engine.endpoint = endpoint

    def _register(self, engine: Engine) -> None:
        assert self.router is not None
        self.router.register_worker(engine.url)
        engine.registered = True

    def _watch(self) -> None:
        try:
            self._watch_all()
        except Exception as error:  # whatever it is: engines would go unwatched from here on
            logger.exception("the engine watcher failed")
            self.failure = self.failure or EngineFailure(
                f"the engine watcher failed: {type(error).__name__}: {error}"
            )

    def _watch_all(self) -> None:
        while not self._stop.wait(WATCH_INTERVAL):
            if self.router is not None and not self.router.is_alive():
                self.failure = EngineFailure(f"the router ended: {self.router.failure_reason()}")
                return
            self._inspect()

    def _inspect(self) -> None:
        """Looks at every engine once and deals with the dead."""
        with self._lock:
            for engine in self.engines:
                reason = _death(engine)
                if reason is not None and not self._stop.is_set():
                    self._on_death(engine, reason)

    def _health_checks(self) -> dict[str, Check]:
        return {str(engine.rank): EngineClient(engine.where).health for engine in self.engines}

    def _on_sick(self, rank: str, reason: str) -> None:
        with self._lock:
            for engine in [engine for engine in self.engines if str(engine.rank) == rank]:
                self._on_death(engine, reason)

    def _on_death(self, engine: Engine, reason: str) -> None:
        message = f"engine {engine.rank} ({engine.url}) ended: {reason}"
        if not self._args.use_fault_tolerance:
            self.failure = self.failure or EngineFailure(message)
            return
        logger.warning("%s; it is replaced before the next weight update", message)
        self.engines = [other for other in self.engines if other is not engine]
        try:
            if self.router is not None:
                self.router.remove_worker(engine.url)
        except RouterError as error:
            self.failure = self.failure or EngineFailure(f"{message}; the router keeps it: {error}")
        self._end(engine)
        if not self.engines:
            self.failure = self.failure or EngineFailure(f"{message}; no engine is left")

    def _end(self, engine: Engine) -> None:
        try:
            wait_one(engine.actor.shutdown.remote(), f"end of engine {engine.rank}", ANSWER_TIMEOUT)
        except (ray.exceptions.RayError, DeadlineExceeded, ProcessDied) as error:
            logger.warning("engine %d did not shut down by itself: %s", engine.rank, error)
        ray.kill(engine.actor)


def with_addresses(args: Namespace) -> Namespace:
    """A copy of ``args`` that says where the router will be and what key all servers will ask for."""
    host = node_host()
    port = args.sglang_router_port or find_available_port(first_port(*ROUTER_PORTS))
    return with_facts(
        args,
        sglang_router_ip=host,
        sglang_router_port=port,
        sglang_model_routers={"default": (host, port)},
        sglang_api_key=engine_api_key(args, host),
    )


def engine_api_key(args: Namespace, host: str) -> str | None:
    """The key of all engines of a run: ``--sglang-api-key``, else a new token if they leave loopback.

    To be called once per run; engines, router and clients share the result.
    """
    configured = getattr(args, "sglang_api_key", None)
    if configured or is_loopback(host):
        return configured
    return secrets.token_urlsafe(32)


def _death(engine: Engine) -> str | None:
    """Why the engine no longer serves; None while it does."""
    try:
        return wait_one(engine.actor.failure_reason.remote(), f"life of engine {engine.rank}", ANSWER_TIMEOUT)
    except (ProcessDied, DeadlineExceeded) as error:
        return f"its keeper is gone: {error}"
