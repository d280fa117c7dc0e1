"""slime's own router, which takes the place of sglang-router with ``--use-slime-router``."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from slime.arguments.core.flag import flag, flags_of
from slime.arguments.core.group import ConfigGroup
from slime.arguments.core.limits import MOST_SECONDS
from slime.arguments.groups.router import SESSION_POLICY, given_router_options, stock_policies


@dataclass(frozen=True)
class SlimeRouterArgs:
    """slime's own router, which passes requests and answers on untouched."""

    use_slime_router: bool = flag(False, help="use slime's own router in place of sglang-router")
    slime_router_middleware_paths: list[str] = flag(
        [], dotted_path=True, help="ASGI middleware classes; the last is outermost"
    )
    slime_router_timeout: float | None = flag(
        above=0, at_most=MOST_SECONDS, help="seconds that an engine has for one request; default for ever"
    )
    slime_router_max_connections: int | None = flag(
        above=0, help="connections to engines; default --sglang-server-concurrency for each engine"
    )
    slime_router_health_check_failure_threshold: int = flag(
        3, above=0, help="failed health checks in a row after which an engine gets no more requests"
    )
    slime_router_processes: int = flag(
        1, above=0, at_most=64, help="processes that share the requests; middleware needs 1"
    )
    slime_router_radix_tree_tokens: int = flag(
        20_000_000, above=0, help="tokens that RadixTreeMiddleware remembers; each takes about 20 bytes"
    )


def notes(args: Namespace) -> Iterator[str]:
    """Options of a router that is not used."""
    if args.use_slime_router:
        return
    for spec in flags_of(SlimeRouterArgs):
        value = getattr(args, spec.dest)
        if value != spec.default and spec.dest != "slime_router_middleware_paths":
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
    if any(model.has_pd_disaggregation for model in args.served_models):
        yield "--use-slime-router: knows no prefill and decode (wanted: the default, sglang-router)"
    if paths and args.slime_router_processes > 1:
        yield (
            f"--slime-router-processes {args.slime_router_processes}: each process would have its own "
            "middleware (wanted: 1 with --slime-router-middleware-paths)"
        )


CONFIG_GROUP = ConfigGroup({"slime router": SlimeRouterArgs}, notes=notes, contradictions=contradictions)
