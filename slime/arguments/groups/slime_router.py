"""slime's own router, which takes the place of sglang-router with ``--use-slime-router``."""

from argparse import Namespace
from collections.abc import Iterator

from slime.arguments.core.flag import changed, flags_of
from slime.arguments.core.group import ConfigGroup
from slime.arguments.groups.router import SESSION_POLICY, given_router_options, stock_policies
from slime.config.slime_router import SlimeRouterConfig


def notes(args: Namespace) -> Iterator[str]:
    """Options of a router that is not used."""
    if args.use_slime_router:
        return
    for spec, value in changed(args, flags_of(SlimeRouterConfig)):
        if spec.dest != "slime_router_middleware_paths":
            yield f"{spec.names[0]} {value}: has no effect without --use-slime-router"


def contradictions(args: Namespace) -> Iterator[str]:
    """What only one of the two routers does."""
    paths = args.slime_router_middleware_paths
    if not args.use_slime_router:
        if paths:
            yield f"--slime-router-middleware-paths {paths[0]}: needs --use-slime-router"
        if args.router_policy == SESSION_POLICY and SESSION_POLICY not in stock_policies():
            yield f"--router-policy {SESSION_POLICY}: needs --use-slime-router"
        return
    for option, value in given_router_options(args):
        if (option, value) != ("--router-policy", SESSION_POLICY):
            shown = option if isinstance(value, bool) else f"{option} {value}"
            wanted = f"--router-policy {SESSION_POLICY} at most"
            yield f"{shown}: sglang-router's, not of --use-slime-router (wanted: {wanted})"
    if paths and args.slime_router_processes > 1:
        yield (
            f"--slime-router-processes {args.slime_router_processes}: each process would have its own "
            "middleware (wanted: 1 with --slime-router-middleware-paths)"
        )


CONFIG_GROUP = ConfigGroup({"slime router": SlimeRouterConfig}, notes=notes, contradictions=contradictions)
