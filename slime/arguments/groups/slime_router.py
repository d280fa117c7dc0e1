"""slime's own router, which takes the place of sglang-router with ``--use-slime-router``."""

import math
from argparse import Namespace
from collections.abc import Iterator

from slime.arguments.core.flag import changed, flags_of
from slime.arguments.core.group import ConfigGroup
from slime.arguments.groups.router import SESSION_POLICY, given_router_options, stock_policies
from slime.config.flag import LEAVE_OUT
from slime.config.router import CACHE_POLICY
from slime.config.slime_router import SlimeRouterConfig

_POLICIES = (CACHE_POLICY, SESSION_POLICY)
_RANGES = {
    "--router-cache-threshold": (0, 1),
    "--router-balance-abs-threshold": (0, math.inf),
    "--router-balance-rel-threshold": (1, math.inf),
    "--router-max-tree-size": (64, math.inf),
}
"""The options of sglang-router that `slime.router` has too, with ``--router-policy cache_aware``."""


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
    yield from _wrong_router_options(args)
    if paths and args.slime_router_processes > 1:
        yield (
            f"--slime-router-processes {args.slime_router_processes}: each process would have its own "
            "middleware (wanted: 1 with --slime-router-middleware-paths)"
        )


def _wrong_router_options(args: Namespace) -> Iterator[str]:
    """Options of sglang-router that slime's own does not have, or not with this value or policy."""
    for option, value in given_router_options(args):
        least, most = _RANGES.get(option, (0, 0))
        shown = option if isinstance(value, bool) else f"{option} {value}"
        if option == "--router-policy":
            if value not in _POLICIES:
                yield f"{shown}: not of --use-slime-router (wanted: {' or '.join(_POLICIES)})"
        elif option not in _RANGES:
            yield f"{shown}: sglang-router's, not of --use-slime-router (wanted: {LEAVE_OUT})"
        elif args.router_policy != CACHE_POLICY:
            yield f"{shown}: needs --router-policy {CACHE_POLICY} with --use-slime-router"
        elif not (isinstance(value, int | float) and least <= value <= most):
            wanted = f"{least} or more" if most == math.inf else f"{least} to {most}"
            yield f"{shown}: with --use-slime-router (wanted: {wanted})"


CONFIG_GROUP = ConfigGroup({"slime router": SlimeRouterConfig}, notes=notes, contradictions=contradictions)
