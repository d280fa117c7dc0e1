"""What a router is told of engines."""

import time
from typing import Any

from slime.backends.sglang_utils.router import Router, RouterError
from slime.ray.engine import Engine

_LOOK_AGAIN = 0.1  # seconds


def register(router: Router, engine: Engine) -> None:
    """Returns when the router sends requests to the engine."""
    port = engine.endpoint.bootstrap_port
    half: dict[str, Any] = {} if port is None else {"bootstrap_port": port}
    router.register_worker(engine.url, engine.kind, **half)


def require_alive_if_it_joins(engine: Engine) -> None:
    """
    Raises:
        RouterError: it joins, and has ended before it was listed: its death is still its own alone.
    """
    if engine.joins and (reason := engine.handle.failure_reason()) is not None:
        raise RouterError(f"{engine} ended while the router was told of it: {reason}")


def list_again(router: Router, engine: Engine) -> None:
    """Tells a new router of an engine that served behind the one before, unless it has ended."""
    try:
        register(router, engine)
    except RouterError:
        if engine.lives and engine.handle.failure_reason() is None:
            raise
    if not engine.lives:
        # Whoever found it dead may have asked the router before it was listed there.
        router.remove_worker(engine.url)


def end_of(router: Router, notice: float) -> str | None:
    """How a router has ended, perhaps within the next seconds; None if it runs."""
    deadline = time.monotonic() + notice
    while (reason := router.failure_reason()) is None and time.monotonic() < deadline:
        time.sleep(_LOOK_AGAIN)
    return reason
