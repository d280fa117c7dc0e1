"""Tensors that an engine joins when it loads them, in the same bucket."""

from collections.abc import Iterable, Iterator

from slime.training.weights import NamedTensors
from slime.weight_sync.filters.filter import Filter

# SGLang keeps the down-projections of multi-latent attention in one matrix. It writes that when it has met
# both in one request, and forgets one that came alone.
_FIRST, _SECOND = ".q_a_proj.", ".kv_a_proj_with_mqa."


class WholePairs(Filter):
    """Keeps such tensors together."""

    def apply(self, buckets: Iterable[NamedTensors]) -> Iterator[NamedTensors]:
        return whole_pairs(buckets)


def whole_pairs(buckets: Iterable[NamedTensors]) -> Iterator[NamedTensors]:
    """Yields the same tensors; the first one of a pair waits for the second, which comes later.

    Buckets grow by what waits, the first matrices of a layer.
    """
    waiting: NamedTensors = []
    for bucket in buckets:
        ready, waiting = _sorted_out(bucket, waiting)
        del bucket  # the next one is made without it in memory
        yield ready
        del ready
    if waiting:
        yield waiting


def pair_of(name: str) -> str:
    """Equal for the tensors of a pair, and another one for each other tensor."""
    return _second(name)


def _sorted_out(bucket: NamedTensors, waiting: NamedTensors) -> tuple[NamedTensors, NamedTensors]:
    """What can go, and what waits for its second from now on."""
    present = {name for name, _ in bucket}
    alone = [pair for pair in bucket if _FIRST in pair[0] and _second(pair[0]) not in present]
    whole = [pair for pair in waiting if _second(pair[0]) in present]
    kept = {name for name, _ in (*alone, *whole)}
    still = [*(pair for pair in waiting if pair[0] not in kept), *alone]
    return [*whole, *(pair for pair in bucket if pair[0] not in kept)], still


def _second(name: str) -> str:
    return name.replace(_FIRST, _SECOND)
