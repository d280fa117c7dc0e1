"""The command lines of routers: sglang-router's, and that of slime's own."""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils.command_line import command_line, parser_actions
from slime.config.fleet import FleetConfig
from slime.config.run import options_of, values_of
from slime.utils.addresses import http_url


def router_command(
    config: FleetConfig, *, host: str, port: int, prometheus_port: int, api_key: str | None = None
) -> list[str]:
    """The command line: every ``args.router_*`` that differs from the router's default, and ours."""
    from sglang_router.router_args import RouterArgs

    parser = argparse.ArgumentParser("sglang_router.launch_router")
    RouterArgs.add_cli_args(parser)
    actions = parser_actions(parser)
    given = options_of(config, "router_")
    values = {dest: value for dest in actions if (value := given.get(dest)) is not None}
    changed = {dest for dest, value in values.items() if value != actions[dest].default}
    values |= _defaults_for_training(config, changed)
    values = {"prometheus_port": prometheus_port, "prometheus_host": host} | values
    values |= {"host": host, "port": port}
    if api_key:
        values["api_key"] = api_key
    return [sys.executable, "-m", "sglang_router.launch_router", *command_line(parser, values)]


def metrics_address(config: FleetConfig, host: str, port: int) -> str:
    """Where the stock router can be asked for its metrics: one on all addresses is asked at its own."""
    given = options_of(config, "router_")
    named = given.get("prometheus_host")
    return http_url(host if named in (None, "0.0.0.0", "::") else named, given.get("prometheus_port") or port)


def _defaults_for_training(config: FleetConfig, changed: set[str]) -> dict[str, Any]:
    """Values for options that the user left alone.

    Health checks and circuit breakers are off, because an engine that is paused, updated or offloaded
    looks sick and would get no traffic for a while afterwards; and the run watches its engines itself and
    takes a dead one out. Whoever sets an option of theirs has them back.
    """
    values: dict[str, Any] = {}
    if not any(dest.startswith("health_") for dest in changed):
        values["disable_health_check"] = True
    if not any(dest.startswith("cb_") for dest in changed):
        values["disable_circuit_breaker"] = True
    if "request_timeout_secs" not in changed:
        values["request_timeout_secs"] = config.router.sglang_router_request_timeout_secs
    return values


def slime_router_command(
    config: FleetConfig, *, host: str, port: int, api_key: str | None, args_path: Path
) -> list[str]:
    """Returns the command line of slime's own router: a file that only this user reads, and that it removes.

    It serves the stock router's ``/workers``, so `RouterProcess` speaks to both. Bodies pass through it
    untouched, and a request is sent to a second engine only if the first could not be connected to.

    The file has all of ``args`` that JSON can say: middleware of users' may read any of it.
    """
    values = {name: value for name, value in values_of(config).items() if _is_plain(value)}
    place = {"sglang_router_ip": host, "sglang_router_port": port, "sglang_api_key": api_key}
    args_path.parent.mkdir(parents=True, exist_ok=True)
    args_path.unlink(missing_ok=True)
    descriptor = os.open(args_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(values | place, file)
    return [sys.executable, "-m", "slime.router", str(args_path)]


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)
