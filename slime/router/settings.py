"""What the router takes from ``args``."""

from dataclasses import dataclass
from typing import Any

from slime.utils.http_utils import get_rollout_num_engines


@dataclass(frozen=True)
class RouterSettings:
    """The settings of one router.

    Attributes:
        api_key: that it asks its clients for; None for none.
        timeout: seconds that an engine has for one request; None for ever.
        max_connections: to engines, of all processes together; further requests wait for one.
        check_interval: seconds between two health checks of a worker, and ``check_timeout`` for each.
        failure_threshold: failed checks in a row that quarantine a worker.
        processes: that serve requests.
        middleware_paths: dotted paths of ASGI middleware, the last is outermost.
    """

    host: str
    port: int
    api_key: str | None
    timeout: float | None
    max_connections: int
    check_interval: float
    check_timeout: float
    failure_threshold: int
    processes: int
    middleware_paths: tuple[str, ...]

    @staticmethod
    def of(args: Any) -> "RouterSettings":
        """Returns the settings of a run's ``args``."""
        return RouterSettings(
            host=args.sglang_router_ip,
            port=args.sglang_router_port,
            api_key=args.sglang_api_key,
            timeout=args.slime_router_timeout,
            max_connections=args.slime_router_max_connections
            or args.sglang_server_concurrency * get_rollout_num_engines(args),
            check_interval=args.rollout_health_check_interval,
            check_timeout=args.rollout_health_check_timeout,
            failure_threshold=args.slime_router_health_check_failure_threshold,
            processes=args.slime_router_processes,
            middleware_paths=tuple(args.slime_router_middleware_paths),
        )
