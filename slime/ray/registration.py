"""What a router is told of engines."""

import logging
import time
from typing import Any

from slime.backends.sglang_utils.client import EngineError
from slime.backends.sglang_utils.router import Router, RouterError
from slime.ray.engine import Engine

logger = logging.getLogger(__name__)

_LOOK_AGAIN = 0.1  # seconds
_ANSWER_TIMEOUT = 10.0  # seconds that an engine may take to answer anything at all


def refused(router: Router, engine: Engine) -> RouterError | None:
    """Returns when the router sends requests to the engine, or why it does not."""
    port = engine.endpoint.bootstrap_port
    half: dict[str, Any] = {} if port is None else {"bootstrap_port": port}
    try:
        router.register_worker(engine.url, engine.kind, **half)
    except RouterError as error:
        return error
    return None


def takes(router: Router, engine: Engine) -> bool:
    """Whether a router has been told of an engine; not if that hangs, or has ended.

    Raises:
        RouterError: the engine answers, and the router refuses it.
    """
    refusal = refused(router, engine)
    if refusal is None:
        return True
    if not engine.lives or engine.handle.failure_reason() is not None:
        return False
    if not hangs(engine):
        raise refusal
    logger.warning("the router does without %s: %s", engine, refusal)
    return False


def hangs(engine: Engine) -> bool:
    """Whether it gives no answer, of whatever kind."""
    try:
        engine.client.request("GET", "/server_info", timeout=_ANSWER_TIMEOUT)
    except EngineError as error:
        return error.status is None
    return False


def require_alive_if_it_joins(engine: Engine) -> None:
    """
    Raises:
        RouterError: it joins, and has ended before it was listed: its death is still its own alone.
    """
    if engine.joins and (reason := engine.handle.failure_reason()) is not None:
        raise RouterError(f"{engine} ended while the router was told of it: {reason}")


def end_of(router: Router, notice: float) -> str | None:
    """How a router has ended, perhaps within the next seconds; None if it runs."""
    deadline = time.monotonic() + notice
    while (reason := router.failure_reason()) is None and time.monotonic() < deadline:
        time.sleep(_LOOK_AGAIN)
    return reason
