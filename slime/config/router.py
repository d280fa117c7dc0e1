"""How requests reach the engines: the router and the options of its own parser (``--router-*``)."""

from dataclasses import dataclass

from slime.config.flag import flag, foreign_flag, refused
from slime.config.limits import MAX_SECONDS

CACHE_POLICY = "cache_aware"
"""A request goes to the engine that has most of its prompt in its cache."""


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How requests reach the engines.

    Attributes:
        router_policy: how the router chooses an engine, a flag of its own parser; None for its default. The
            other ``router_`` are those that slime's own router takes too.
        sglang_model_routers: host and port of the router of each served model; empty until they are known.
        sglang_api_key: the key of all servers of the run; None if all are of others and ask for none.
    """

    sglang_server_concurrency: int = flag(512, above=0, help="requests in flight per serving engine at most")
    sglang_router_request_timeout_secs: int = flag(
        14400, above=0, at_most=MAX_SECONDS, help="seconds the router waits for one request"
    )
    sglang_router_ip: str | None = flag(help="address of a router started elsewhere")
    sglang_router_port: int | None = flag(
        at_least=1, at_most=65535, help="port of the first model's router; default a free one"
    )
    http_proxy: str | None = refused(help="proxy of requests to the engines")
    use_distributed_post: bool = refused(False, help="send requests from every node")
    router_policy: str | None = foreign_flag(None)
    router_cache_threshold: float = foreign_flag(0.3)
    router_balance_abs_threshold: int = foreign_flag(10)
    router_balance_rel_threshold: float = foreign_flag(1.2)
    router_max_tree_size: int = foreign_flag(2**26)
    sglang_model_routers: dict[str, tuple[str, int]]
    sglang_api_key: str | None = foreign_flag()
