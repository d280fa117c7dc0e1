"""How many requests an engine holds, by what it says itself."""

from slime.backends.sglang_utils.client import EngineError
from slime.backends.sglang_utils.server_control import num_requests_from_load
from slime.ray.engine import Engine

_LOAD_TIMEOUT = 5.0  # seconds that it may take to say so


def requests_of(engine: Engine) -> int:
    """How many requests it holds, running and waiting.

    Raises:
        EngineError: it does not say.
    """
    load = engine.client.request("GET", "/v1/loads", params={"include": "core"}, timeout=_LOAD_TIMEOUT)
    return num_requests_from_load(load)


def requests_held(engine: Engine) -> int | None:
    """The same; none if it has ended or refuses to say, and None if it gives no answer."""
    try:
        return requests_of(engine)
    except EngineError as error:
        return None if error.status is None and engine.handle.failure_reason() is None else 0
