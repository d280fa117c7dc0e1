"""Where stand-ins are put: names in modules of the product, for the time of one history."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import httpcore
import httpx

from tests.simulation import hooks
from tests.simulation.engines import RouterHost, RouterServer, SimEngineActor
from tests.simulation.network import Client, EnginePool, send
from tests.simulation.operators import WatchedMembership
from tests.simulation.plan import ROUTER
from tests.simulation.stand_ins import Module
from tests.simulation.trainers import Backend, SimTrainActor, SimTransport

UNDER_SIMULATION = (
    "slime.ray.asynchronous",
    "slime.ray.synchronous",
    "slime.ray.healing",
    "slime.ray.pending_rollout",
    "slime.ray.rollout_group",
    "slime.ray.train_group",
    "slime.ray.rank_processes",
    "slime.ray.waiting",
    "slime.ray.rollout_manager",
    "slime.ray.policy_samples",
    "slime.ray.fleet_setup",
    "slime.ray.fleet",
    "slime.ray.engine_starts",
    "slime.ray.engine_requests",
    "slime.ray.members",
    "slime.ray.membership",
    "slime.ray.membership_checks",
    "slime.ray.registration",
    "slime.ray.served_model",
    "slime.ray.model_engines",
    "slime.ray.engine_rows",
    "slime.ray.engine_group",
    "slime.ray.engine",
    "slime.ray.engine_scaling",
    "slime.ray.engine_watch",
    "slime.ray.spawned_engines",
    "slime.ray.train_worker",
    "slime.weight_sync.update",
    "slime.weight_sync.plan",
    "slime.weight_sync.agreement",
    "slime.weight_sync.transports.session",
    "slime.backends.sglang_utils.client",
    "slime.backends.sglang_utils.router",
    "slime.processes.silence",
    "slime.backends.sglang_utils.server_control",
    "slime.rollout.answer_log",
    "slime.rollout.async_worker",
    "slime.rollout.fully_async_rollout",
    "slime.rollout.sglang_rollout",
    "slime.rollout.generation",
    "slime.rollout.generate_state",
    "slime.rollout.data_source",
    "slime.rollout.ledger",
    "slime.rollout.weight_versions",
    "slime.utils.async_utils",
    "slime.utils.http_utils",
    "slime.utils.weight_clock",
)
"""Modules whose classes and functions a history runs as they are."""


class Tokenizer:
    """One token for each character."""

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [1 + ord(character) % 50 for character in text]}

    def decode(self, tokens: list[int], **options: Any) -> str:
        return "a" * len(tokens)


class NoWatch:
    """In place of `ProcessWatch`: nobody sends SIGSTOP here."""

    def add(self, name: str, actor: Any) -> None:
        return

    def check(self) -> None:
        return

    def add_process(self, name: str, location: Any) -> None:
        return

    def wait_until_gone(self, timeout: float) -> None:
        return

    def show_stacks(self) -> None:
        return


def names_of(sim: Any) -> dict[str, Any]:
    """What stands where, by dotted path."""
    modules, network, ray = sim.modules, sim.network, sim.ray
    client = lambda base_url, timeout, **options: Client(network, base_url, timeout)
    http = Module(httpx, Client=client)
    pools = Module(httpcore, ConnectionPool=lambda **options: EnginePool(network))
    nothing = lambda *arguments, **options: None
    no_environment = lambda *arguments, **options: {}
    gc = SimpleNamespace(collect=nothing, freeze=nothing)

    def start_router(*arguments: Any, **options: Any) -> Any:
        sim.rules.router_starts()
        sim.world.sleep(2.0 * sim.world.rng.random())
        server = RouterServer(sim)
        url = f"http://{ROUTER[0]}:{ROUTER[1]}"
        network.servers[url], sim.router = server, server
        sim.world.current.process.at_end.append(lambda: server.die("ended with its manager"))
        limit = sim.args.rollout_router_hang_timeout
        kind = import_module("slime.backends.sglang_utils.router").RouterProcess
        return kind(RouterHost(server), url, hang_timeout=limit)

    def batch(config: Any, samples: list[Any]) -> Any:
        sim.rules.batch(samples)
        return import_module("slime.training.conversion").samples_to_train_data(config, samples)

    async def send_here(*arguments: Any) -> Any:
        return await send(network, modules.loop(), *arguments)

    times = {
        f"{module}.time": modules.time
        for module in (
            *("slime.ray.fleet", "slime.ray.engine_watch", "slime.ray.waiting", "slime.ray.rollout_manager"),
            *("slime.ray.served_model", "slime.ray.engine_starts", "slime.ray.membership"),
            *("slime.ray.engine_scaling", "slime.ray.registration", "slime.ray.members"),
            *("slime.backends.sglang_utils.client", "slime.backends.sglang_utils.server_control"),
            *("slime.backends.sglang_utils.router", "slime.processes.silence"),
            *("tenacity", "tenacity.nap"),
        )
    }
    threads = {
        f"slime.ray.{module}.threading": modules.threading
        for module in (
            *("fleet", "engine_watch", "engine", "served_model", "engine_starts", "engine_group"),
            *("members", "membership", "spawned_engines", "engine_scaling"),
        )
    }
    rays = {
        f"slime.ray.{module}.ray": ray
        for module in (
            *("waiting", "rollout_group", "train_group", "engine_starts", "spawned_engines"),
            *("train_worker", "rank_processes"),
        )
    }
    return {
        **times,
        **threads,
        **rays,
        "slime.ray.fleet.Membership": WatchedMembership,
        "slime.ray.fleet.ThreadPoolExecutor": modules.pool,
        "slime.ray.engine_watch.ThreadPoolExecutor": modules.pool,
        "slime.ray.served_model.ThreadPoolExecutor": modules.pool,
        "slime.ray.engine_watch.wait": modules.wait,
        "slime.ray.healing.node_is_alive": lambda: True,
        "slime.ray.rollout_manager.ThreadPoolExecutor": modules.pool,
        "slime.ray.rollout_manager.with_addresses": lambda config: config,
        "slime.ray.policy_samples.samples_to_train_data": batch,
        "slime.ray.rollout_manager.spare_collector": nothing,
        "slime.ray.fleet_setup.start_router": start_router,
        "slime.ray.fleet_setup.find_available_port": lambda port: port,
        "slime.ray.fleet_setup.log_dir": lambda: _Directory(),
        "slime.ray.rollout_group.ProcessWatch": NoWatch,
        "slime.ray.spawned_engines.ProcessWatch": NoWatch,
        "slime.ray.train_group.ProcessWatch": NoWatch,
        "slime.ray.rank_processes.TrainRayActor": SimTrainActor,
        "slime.ray.spawned_engines.EngineActor": SimEngineActor,
        "slime.ray.rank_processes.process_env": no_environment,
        "slime.ray.rank_processes.runtime_env": no_environment,
        "slime.ray.rollout_group.process_env": no_environment,
        "slime.ray.rollout_group.runtime_env": no_environment,
        "slime.ray.spawned_engines.process_env": no_environment,
        "slime.ray.spawned_engines.runtime_env": no_environment,
        "slime.ray.train_group.phases": SimpleNamespace(reached=nothing),
        "slime.ray.train_worker.os": SimpleNamespace(environ={}),
        "slime.ray.train_worker.gc": gc,
        "slime.ray.train_worker.local_gpu": lambda: 0,
        "slime.ray.train_worker.node_host": lambda: "127.0.0.1",
        "slime.ray.train_worker.reserve_port": lambda host: 1,
        "slime.ray.train_worker.load_function": lambda path: Backend,
        "slime.ray.train_worker.Trainer": nothing,
        "slime.weight_sync.agreement.dist": sim.gloo,
        "slime.weight_sync.update.dist": sim.gloo,
        "slime.weight_sync.update.monotonic": modules.monotonic,
        "slime.weight_sync.update.transports_of": lambda config: [SimTransport(config)],
        "slime.weight_sync.transports.session.dist": sim.gloo,
        "slime.weight_sync.transports.session.monotonic": modules.monotonic,
        "slime.weight_sync.transports.session.ThreadPoolExecutor": modules.pool,
        "slime.weight_sync.transports.session.time": modules.time,
        "slime.backends.sglang_utils.client.httpcore": pools,
        "slime.backends.sglang_utils.router.httpx": http,
        "slime.rollout.async_worker.get_async_loop": modules.loop,
        "slime.utils.async_utils.get_async_loop": modules.loop,
        "slime.utils.async_utils.asyncio": modules.asyncio,
        "slime.utils.http_utils.send": send_here,
        "slime.rollout.generate_state.load_tokenizer": lambda *arguments: Tokenizer(),
        "slime.rollout.data_source.load_tokenizer": lambda *arguments: Tokenizer(),
        "slime.rollout.data_source.state_path": lambda directory, rollout_id: sim.disk.place(rollout_id),
        "slime.rollout.data_source.write_state": sim.disk.write,
        "slime.rollout.data_source.read_state": sim.disk.read,
        "slime.rollout.data_source.RolloutDataSource._load_dataset": lambda self: sim.dataset(),
    }


class _Directory:
    def __truediv__(self, name: str) -> str:
        return name


@contextmanager
def in_place(sim: Any) -> Iterator[None]:
    """Puts all stand-ins in their places, and takes them away again."""
    before = []
    for path, value in names_of(sim).items():
        owner, name = _owner(path)
        before.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)
    for kind in (
        hooks.WatchedSource,
        SimEngineActor,
        SimTrainActor,
        SimTransport,
        Backend,
        WatchedMembership,
    ):
        kind.sim = sim
    hooks.WatchedSource.rules = sim.rules
    try:
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


def _owner(path: str) -> tuple[Any, str]:
    parent, _, name = path.rpartition(".")
    try:
        return import_module(parent), name
    except ModuleNotFoundError:
        module, _, kind = parent.rpartition(".")
        return getattr(import_module(module), kind), name
