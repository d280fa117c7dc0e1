"""Gives memory back between rollouts and takes it again."""

from slime.backends.embedded_engine.engine import Engine
from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.named_weights import NamedWeights
from slime.utils.accelerator import empty_cache

TAGS = ("kv_cache", "weights", "cuda_graph")


class MemoryOccupation:
    """Release and resume by tag; runs on the engine thread.

    As in SGLang memory is only freed under ``--enable-memory-saver``, and weights only survive under
    ``--enable-weights-cpu-backup``. Requests that arrive in between wait.
    """

    def __init__(self, engine: Engine, parameters: NamedWeights, enabled: bool, keep_weights: bool) -> None:
        self._engine = engine
        self._parameters = parameters
        self._enabled = enabled
        self._keep_weights = keep_weights

    def release(self, tags: list[str] | None) -> None:
        chosen = _known(tags) - self._engine.released
        if self._engine.scheduler.live:
            raise BadRequest("memory cannot be released while requests are running or queued")
        self._engine.released |= chosen
        if self._enabled and "kv_cache" in chosen:
            self._engine.cache.clear()
        if self._enabled and "weights" in chosen:
            self._parameters.release(self._keep_weights)
        if self._enabled:
            empty_cache()

    def resume(self, tags: list[str] | None) -> None:
        chosen = _known(tags) if tags else set(self._engine.released)
        missing = sorted(chosen - self._engine.released)
        if missing or not chosen:
            raise BadRequest(f"tags {missing or list(TAGS)}: not released, so there is nothing to resume")
        if self._enabled and "weights" in chosen:
            self._parameters.resume()
        self._engine.released -= chosen


def _known(tags: list[str] | None) -> set[str]:
    """The tags; without any, all there are, as in SGLang."""
    unknown = sorted(set(tags or ()) - set(TAGS))
    if unknown:
        raise BadRequest(f"tags {unknown}: wanted some of {', '.join(TAGS)}")
    return set(tags or TAGS)
