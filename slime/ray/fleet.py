"""All models that a run serves: their engines, and the routers in front of them."""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from slime.arguments.facts import with_facts
from slime.arguments.views import FleetView
from slime.backends.sglang_utils.client import EngineClient, EngineError
from slime.backends.sglang_utils.router import Router, start_router
from slime.ray.engine import Engine, EngineState
from slime.ray.engine_group import EngineGroup
from slime.ray.engine_keeper import SpawnedEngines
from slime.ray.engine_watch import EngineFailure, EngineWatch, WatchTimes
from slime.ray.node import first_port, log_dir, node_host
from slime.ray.placement_group import Slots
from slime.ray.served_model import ServedModel
from slime.utils.http_utils import find_available_port, is_loopback
from slime.utils.types import EngineEndpoint

ROUTER_PORTS = (3000, 1000)
END_TIMEOUT = 180.0  # seconds for a dead engine to leave its router and to end
LOOK_AGAIN = 0.2  # seconds between two looks for a death that is suspected
ENDED_AT_ONCE = 64  # engines

Answer = TypeVar("Answer")


class Fleet:
    """Starts, watches, replaces and stops the engines of every model.

    With ``--use-fault-tolerance`` a dead engine leaves its router at once, and ``recover`` starts a new
    one, which serves only after ``admit``: after it has been given current weights. Without the flag any
    death is a failure, which ``check`` raises.

    ``start``, ``recover``, ``admit``, ``release`` and ``resume`` are called one at a time, the others at any
    time.
    """

    def __init__(self, args: FleetView, models: Sequence[ServedModel]) -> None:
        self._args = args
        self.models = {model.name: model for model in models}
        times = WatchTimes(
            interval=args.rollout_health_check_interval,
            timeout=args.rollout_health_check_timeout,
            first_wait=args.rollout_health_check_first_wait,
        )
        self._watch = EngineWatch(models, times, tolerant=args.use_fault_tolerance)

    @property
    def endpoints(self) -> list[EngineEndpoint]:
        """Of the living engines that take updates."""
        return [engine.endpoint for model in self._updated for engine in model.living]

    @property
    def launches(self) -> int:
        """Engines that take updates started so far: a replacement may serve at its predecessor's address."""
        return sum(model.launches for model in self._updated)

    def start(self) -> None:
        """Launches everything at once, and returns when every engine is routed to."""
        for model in self.models.values():
            model.launch()
        for model in self.models.values():
            model.wait_ready(self._args.engine_startup_timeout)
            for engine in model.living:
                model.admit(engine)
                if model.takes_updates and self._args.check_weight_update_equal:
                    # Now, as an engine that shares GPUs gives its weights away before the first update.
                    engine.client.weights_checker("snapshot")
        self._watch.start()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """While engines generate they must also answer, not only live; raises a failure found before."""
        self.check()
        self._watch.resume()
        try:
            yield
        finally:
            self._watch.pause()

    def check(self) -> None:
        """Raises what the watch has found to end the run, if anything."""
        self._watch.check()

    def recover(self, patience: float = 0.0) -> None:
        """Starts a replacement for every engine that died; they do not serve yet.

        Args:
            patience: seconds to wait for a death that is suspected.
        """
        # The watch's next look may come too late for one that has just died.
        self._watch.look()
        self._await_a_death(patience)
        self._await_ends()
        self.check()
        for model in self.models.values():
            replacements = model.replace_gone()
            if replacements:
                model.wait_ready(self._args.engine_startup_timeout)
            for engine in replacements:
                self._match_offloaded(engine)
                if not model.takes_updates:
                    model.admit(engine)

    def admit(self, version: str) -> None:
        """Lets engines that serve ``version`` into their routers; the weights have just been updated.

        Raises:
            EngineFailure: an engine reports another version.
        """
        for model in self._updated:
            for engine in model.living:
                found = self._ask(model, engine, lambda client: client.weight_version())
                if found is not None and found != version:
                    raise EngineFailure(
                        f"{engine} serves weight version {found!r}, the trainer sent {version!r}"
                    )
                if engine.state is EngineState.READY:
                    model.admit(engine)

    def release(self) -> None:
        """Frees the engines' memory for a trainer on the same GPUs."""
        self._ask_colocated(lambda client: client.release_memory_occupation())

    def resume(self, tags: list[str]) -> None:
        """Takes memory back: "weights", "kv_cache", "cuda_graph"."""
        self._ask_colocated(lambda client: client.resume_memory_occupation(tags))

    def stop(self) -> None:
        """Ends every engine that is ours to end, and the routers."""
        self._watch.stop()
        engines = [engine for model in self.models.values() for engine in model.engines]
        with ThreadPoolExecutor(ENDED_AT_ONCE, thread_name_prefix="engine-end") as pool:
            list(pool.map(Engine.end, engines))
        for model in self.models.values():
            model.stop_router()

    @property
    def _updated(self) -> list[ServedModel]:
        return [model for model in self.models.values() if model.takes_updates]

    def _await_a_death(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        while not any(model.dead for model in self._updated) and time.monotonic() < deadline:
            time.sleep(LOOK_AGAIN)
            self._watch.look()

    def _await_ends(self) -> None:
        """A replacement may need a dead engine's GPUs, and be given its address."""
        deadline = time.monotonic() + END_TIMEOUT
        for engine in [engine for model in self.models.values() for engine in model.dead]:
            if not engine.gone.wait(max(0.0, deadline - time.monotonic())):
                raise EngineFailure(f"{engine} is dead and has not ended after {END_TIMEOUT:.0f} s")

    def _match_offloaded(self, engine: Engine) -> None:
        """Brings a replacement to where the others are during a weight update: weights in, cache out."""
        if self._args.offload_rollout and engine.is_colocated:
            engine.client.release_memory_occupation()
            engine.client.resume_memory_occupation(["weights"])

    def _ask_colocated(self, request: Callable[[EngineClient], None]) -> None:
        for model in self.models.values():
            for engine in model.living:
                if engine.is_colocated:
                    self._ask(model, engine, request)

    def _ask(
        self, model: ServedModel, engine: Engine, request: Callable[[EngineClient], Answer]
    ) -> Answer | None:
        """The answer to a control request; None from an engine that has died, if that is tolerated."""
        try:
            return request(engine.client)
        except EngineError as error:
            # One that was found dead meanwhile may refuse while it is being ended.
            refused = error.status is not None and engine.lives
            if refused or not self._args.use_fault_tolerance:
                raise
            self._watch.declare_dead(model, engine, str(error))
            return None


def fleet_of(args: FleetView, slots: Slots, trainer_gpus: int) -> Fleet:
    """One model, which takes the trainer's weights, with one group of engines; without slots no model.

    Args:
        args: with addresses.
        trainer_gpus: how many of the slots, from the first on, belong to the trainer too if colocated.
    """
    group = EngineGroup(SpawnedEngines(args, slots, trainer_gpus))
    model = ServedModel("default", [group], lambda: _start_router(args, "default"))
    return Fleet(args, [model] if len(slots) else [])


def _start_router(args: FleetView, model: str) -> Router:
    host, port = args.sglang_model_routers[model]
    return start_router(
        args,
        host=host,
        port=port,
        prometheus_port=find_available_port(metrics_port(port)),
        log_path=log_dir() / "router.log",
        api_key=args.sglang_api_key,
    )


def metrics_port(port: int) -> int:
    """Where to begin to look for a port of the router's metrics, away from the router's own."""
    return port + 1000 if port < 60_000 else port - 1000


def with_addresses(args: FleetView) -> FleetView:
    """A copy of ``args`` that says where the router will be and what key all servers will ask for."""
    host = node_host()
    port = args.sglang_router_port or find_available_port(first_port(*ROUTER_PORTS))
    return with_facts(
        args,
        sglang_router_ip=host,
        sglang_router_port=port,
        sglang_model_routers={"default": (host, port)},
        sglang_api_key=api_key(args, host),
    )


def api_key(args: FleetView, host: str) -> str | None:
    """The key of all servers of a run: ``--sglang-api-key``, else a new token if they leave loopback.

    To be called once per run; engines, routers and clients share the result.
    """
    configured = getattr(args, "sglang_api_key", None)
    if configured or is_loopback(host):
        return configured
    return secrets.token_urlsafe(32)
