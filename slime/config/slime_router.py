"""slime's own router, which takes the place of sglang-router with ``--use-slime-router``."""

from dataclasses import dataclass

from slime.config.flag import flag
from slime.config.limits import MAX_SECONDS


@dataclass(frozen=True, kw_only=True)
class SlimeRouterConfig:
    """slime's own router, which passes requests and answers on untouched."""

    use_slime_router: bool = flag(False, help="use slime's own router in place of sglang-router")
    slime_router_middleware_paths: list[str] = flag(
        [], dotted_path=True, help="ASGI middleware classes; the last is outermost"
    )
    slime_router_timeout: float | None = flag(
        above=0, at_most=MAX_SECONDS, help="seconds that an engine has for one request; default for ever"
    )
    slime_router_max_connections: int | None = flag(
        above=0,
        help="connections to engines; default --sglang-server-concurrency for each engine it has",
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
