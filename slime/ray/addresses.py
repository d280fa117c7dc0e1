"""The addresses of a run's routers, and the key of all its servers."""

import secrets

from slime.arguments.core.runtime_context import with_context
from slime.config.fleet import FleetConfig
from slime.config.run import RunConfig, run_config
from slime.config.served_models import DEFAULT
from slime.ray.node import LOOPBACK, first_port, node_host
from slime.utils.addresses import find_available_port

ROUTER_PORTS = (3000, 1000)


def with_addresses(config: RunConfig) -> RunConfig:
    """The configuration, which says where the routers will be and what key all servers will ask for."""
    key = api_key(config)
    # Without a key nothing of ours may be reached from elsewhere, even if engines of others can be.
    host = node_host() if key else LOOPBACK
    names = [model.name for model in config.engines.served_models] or [DEFAULT]
    ports = _router_ports(config, len(names))
    routers = {name: (host, port) for name, port in zip(names, ports, strict=True)}
    if config.router.sglang_router_ip is not None:
        routers[names[0]] = (config.router.sglang_router_ip, ports[0])
    args = with_context(
        config.flat,
        sglang_router_ip=routers[names[0]][0],
        sglang_router_port=ports[0],
        sglang_model_routers=routers,
        sglang_api_key=key,
    )
    return run_config(args)


def _router_ports(config: FleetConfig, count: int) -> list[int]:
    """The first is that of ``--sglang-router-port``, if it was given."""
    ports = [config.router.sglang_router_port or find_available_port(first_port(*ROUTER_PORTS))]
    while len(ports) < count:
        ports.append(find_available_port(ports[-1] + 1))
    return ports


def api_key(config: FleetConfig) -> str | None:
    """The key of all servers of a run: the one that was given, else a new token.

    Engines, routers and clients share it, also those of a rollout side that starts again. Servers on loopback
    ask for it too, as every user of the machine can reach them.
    """
    configured = config.router.sglang_api_key
    if configured or config.engines.rollout_external:
        return configured  # engines of others ask for no key that is made here
    return secrets.token_urlsafe(32)


def metrics_port(port: int) -> int:
    """Returns where to begin to look for a port of the router's metrics, away from the router's own."""
    return port + 1000 if port < 60_000 else port - 1000
