"""How requests reach the engines: the router and the options of its own parser (``--router-*``)."""

import argparse
import copy
import errno
import os
import socket
from argparse import Namespace
from collections.abc import Iterator

from slime.arguments.core.flag import option_string
from slime.arguments.core.group import ConfigGroup
from slime.arguments.groups.debug import trains_only
from slime.config.router import RouterConfig
from slime.utils.addresses import API_KEY

ROUTER_DEFAULTS = {
    # cache_aware of sglang-router, as ever; SlimeRouter goes by load unless it is told to look into prompts.
    "router_policy": None,
    "router_log_level": "warn",
    "router_balance_abs_threshold": 10,
    "router_balance_rel_threshold": 1.2,
    # Its own defaults are one port, which two runs on a machine cannot share, and every interface.
    "router_prometheus_port": None,
    "router_prometheus_host": None,
}
SESSION_POLICY = "consistent_hashing"
"""Requests of a session go to one engine. The command line of sglang-router 0.3.2 does not offer it."""
_HELP = {
    "router_policy": "how the router chooses an engine; default cache_aware, of --use-slime-router the one "
    "with the fewest requests in flight",
    "router_max_tree_size": "characters of prompts that cache_aware remembers of each engine; with "
    "--use-slime-router bytes, of which a token has 4",
    "router_prometheus_port": "port of the router's metrics; default a free one",
    "router_prometheus_host": "address on which the router shows its metrics; default its own",
}


def add_router_flags(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup) -> None:
    """``--router-*`` for every option of sglang_router, with our defaults."""
    from sglang_router.router_args import RouterArgs as Original

    original = argparse.ArgumentParser(add_help=False)
    Original.add_cli_args(original, use_router_prefix=True, exclude_host_port=True)
    for action in original._actions:
        if not action.option_strings[0].startswith("--router-"):
            continue
        adopted = copy.copy(action)
        group._add_action(adopted)
        if adopted.help:
            # The original writes its defaults into the help, which would contradict ours.
            adopted.help = adopted.help.split(" (default")[0]
        adopted.help = _HELP.get(adopted.dest, adopted.help)
        if adopted.dest == "router_policy" and SESSION_POLICY not in (adopted.choices or ()):
            adopted.choices = [*(adopted.choices or ()), SESSION_POLICY]
            adopted.help = f"{adopted.help}; {SESSION_POLICY} needs --use-slime-router"
        if adopted.dest in ROUTER_DEFAULTS:
            adopted.default = ROUTER_DEFAULTS[adopted.dest]
            parser.set_defaults(**{adopted.dest: adopted.default})


def derive(args: Namespace) -> None:
    """No router has an address yet. A key that no command line shows is in the environment."""
    args.sglang_model_routers = {}
    args.sglang_api_key = getattr(args, "sglang_api_key", None) or os.environ.get(API_KEY) or None


def contradictions(args: Namespace) -> Iterator[str]:
    """A router of somebody else's without its port."""
    if args.sglang_router_ip is not None and args.sglang_router_port is None:
        yield f"--sglang-router-ip {args.sglang_router_ip}: needs --sglang-router-port"
    if args.sglang_router_ip is not None and args.use_slime_router:
        yield "--sglang-router-ip and --use-slime-router: only one of them at a time"


def stock_policies() -> tuple[str, ...]:
    """What the installed sglang-router takes for its ``--policy``."""
    from sglang_router.router_args import RouterArgs as Original

    parser = argparse.ArgumentParser(add_help=False)
    Original.add_cli_args(parser)
    return next(tuple(action.choices or ()) for action in parser._actions if action.dest == "policy")


def given_router_options(args: Namespace) -> Iterator[tuple[str, object]]:
    """The options of sglang_router, and their values, that are not what they are by default."""
    parser = argparse.ArgumentParser(add_help=False)
    add_router_flags(parser, parser.add_argument_group("router"))
    for action in parser._actions:
        value = getattr(args, action.dest)
        if value != parser.get_default(action.dest):
            yield action.option_strings[0], value


def missing(args: Namespace) -> Iterator[str]:
    """Ports that are another server's. The router of a cluster that is there already may run elsewhere."""
    if trains_only(args) or os.environ.get("RAY_ADDRESS"):
        return
    for name in ("sglang_router_port", "router_prometheus_port"):
        port = getattr(args, name)
        if name == "sglang_router_port" and args.sglang_router_ip is not None:
            continue  # it is there already
        if port is not None and (reason := _why_not_free(port)):
            yield f"{option_string(name)} {port}: {reason} (wanted: another port, or leave it out)"


def _why_not_free(port: int) -> str | None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OverflowError:
            return "is not a port"
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            return "in use" if taken else f"cannot be listened on ({error.strerror})"
    return None


CONFIG_GROUP = ConfigGroup(
    {"requests to the engines": RouterConfig},
    derive=derive,
    contradictions=contradictions,
    missing=missing,
)
