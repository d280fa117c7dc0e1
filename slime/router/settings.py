"""What the router takes from ``args``."""

from dataclasses import dataclass
from typing import Any

from slime.config.cluster import FaultToleranceConfig
from slime.config.router import CACHE_POLICY, RouterConfig
from slime.config.run import filled
from slime.config.slime_router import SlimeRouterConfig


@dataclass(frozen=True)
class CacheAwareSettings:
    """``--router-policy cache_aware``; each field is the option of sglang-router that has its name."""

    cache_threshold: float
    balance_abs_threshold: int
    balance_rel_threshold: float
    max_tree_size: int


@dataclass(frozen=True)
class RouterSettings:
    """The settings of one router.

    Attributes:
        api_key: that it asks its clients for; None for none.
        timeout: seconds that an engine has for one request; None for ever.
        max_connections: to engines, of all processes together; further requests wait for one; None for
            ``connections_of_each`` engine that is registered.
        check_interval: seconds between two health checks of a worker, and ``check_timeout`` for each.
        failure_threshold: failed checks in a row that quarantine a worker.
        processes: that serve requests.
        middleware_paths: dotted paths of ASGI middleware, the last is outermost.
        cache_aware: how to go by what workers have cached; None to go by their load alone.
    """

    host: str
    port: int
    api_key: str | None
    timeout: float | None
    max_connections: int | None
    connections_of_each: int
    check_interval: float
    check_timeout: float
    failure_threshold: int
    processes: int
    middleware_paths: tuple[str, ...]
    cache_aware: CacheAwareSettings | None

    @staticmethod
    def of(args: Any) -> "RouterSettings":
        """Returns the settings of a run's ``args``."""
        router, own = filled(RouterConfig, args, thin=True), filled(SlimeRouterConfig, args, thin=True)
        checks = filled(FaultToleranceConfig, args, thin=True)
        host, port = router.sglang_router_ip, router.sglang_router_port
        assert host is not None and port is not None  # both are known before a router starts
        return RouterSettings(
            host=host,
            port=port,
            api_key=router.sglang_api_key,
            timeout=own.slime_router_timeout,
            max_connections=own.slime_router_max_connections,
            connections_of_each=router.sglang_server_concurrency,
            check_interval=checks.rollout_health_check_interval,
            check_timeout=checks.rollout_health_check_timeout,
            failure_threshold=own.slime_router_health_check_failure_threshold,
            processes=own.slime_router_processes,
            middleware_paths=tuple(own.slime_router_middleware_paths),
            cache_aware=_cache_aware(router),
        )


def _cache_aware(router: RouterConfig) -> CacheAwareSettings | None:
    if router.router_policy != CACHE_POLICY:
        return None
    return CacheAwareSettings(
        cache_threshold=router.router_cache_threshold,
        balance_abs_threshold=router.router_balance_abs_threshold,
        balance_rel_threshold=router.router_balance_rel_threshold,
        max_tree_size=router.router_max_tree_size,
    )
