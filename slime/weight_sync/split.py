"""The weights of an update split among trainer ranks, so that each converts and keeps a part of them."""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heapreplace

from slime.training.weights import NamedTensors, StagedWeights, TensorInfo
from slime.weight_sync.filters.pairs import pair_of


def split(tensors: Iterable[TensorInfo], stages: Sequence[int]) -> list[frozenset[str]]:
    """The names of the tensors that each rank is given: of its own stage, about as many bytes as others.

    Neighbours in the order of the tensors go to different ranks, so that all have something to do with each
    bucket; those that filters keep together go to one.

    Args:
        stages: of the ranks, in order; of each stage that has tensors there is one.
    """
    units: dict[str, list[TensorInfo]] = {}
    for tensor in tensors:
        units.setdefault(pair_of(tensor.name), []).append(tensor)
    loads = {stage: [(0, rank) for rank, own in enumerate(stages) if own == stage] for stage in set(stages)}
    for ranks in loads.values():
        heapify(ranks)
    names: list[set[str]] = [set() for _ in stages]
    for unit in units.values():
        ranks = loads[unit[0].owner]
        used, rank = ranks[0]
        heapreplace(ranks, (used + sum(tensor.nbytes for tensor in unit), rank))
        names[rank] |= {tensor.name for tensor in unit}
    return [frozenset(own) for own in names]


class Share:
    """Some tensors of this rank's pipeline stage. Ranks of a stage iterate in step, whatever each is given.

    Args:
        names: of the tensors that this rank is given.
    """

    def __init__(self, weights: StagedWeights, names: frozenset[str]) -> None:
        self._weights, self._names = weights, names
        self.ranks = weights.ranks

    @property
    def rounding(self) -> float:
        return self._weights.rounding

    def manifest(self) -> list[TensorInfo]:
        return [tensor for tensor in self._weights.manifest() if tensor.name in self._names]

    def buckets(self, max_bytes: int) -> Iterator[NamedTensors]:
        """For each bucket of the stage one, which may be empty; see `Filter.apply`."""
        for bucket in self._weights.own_buckets(max_bytes):
            own = [pair for pair in bucket if pair[0] in self._names]
            del bucket  # the next one is made without it in memory
            yield own
            del own
