"""The tensors that ranks of engines have of a model, by the numbers of their ranks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch

from slime.models.served_layout import ServedTensor
from slime.training.weights import ShardedWeights
from slime.weight_sync.shards.moves import require_all_served


class EngineRank(NamedTuple):
    """A rank of an engine, and how many that has."""

    rank: int
    size: int


class Layouts:
    """What engines of these sizes have of the weights.

    Attributes:
        dtypes: of the tensors of a checkpoint.

    Raises:
        ValueError: numbers of the trainer's go to no engine rank, or one wants a tensor that there is not; or
            how such engines hold the model is not known.
    """

    def __init__(self, weights: ShardedWeights, sizes: Iterable[int]) -> None:
        infos = weights.manifest()
        self.dtypes = {info.name: info.dtype for info in infos}
        self._tensors = cache(weights.served)
        self._nbytes: dict[str, int] = {}
        for size in sorted(set(sizes)):
            ranks = [self._tensors(rank, size) for rank in range(size)]
            require_all_served({info.name: info.shape for info in infos}, ranks)
            for one in ranks[0]:
                self._nbytes[one.name] = max(self.nbytes(one), self._nbytes.get(one.name, 0))

    def of(self, place: EngineRank) -> Sequence[ServedTensor]:
        """The tensors of a rank, in an order that is the same for all of them."""
        return self._tensors(*place)

    def dtype(self, one: ServedTensor) -> torch.dtype:
        """
        Raises:
            ValueError: its parts have several.
        """
        found = {self.dtypes[block.name] for block in one.blocks} or {self.dtypes[one.name]}
        if len(found) > 1:
            raise ValueError(f"engine tensor {one.name!r}: {sorted(map(str, found))} (wanted: one format)")
        return found.pop()

    def nbytes(self, one: ServedTensor) -> int:
        return torch.Size(one.shape).numel() * self.dtype(one).itemsize

    def bucketed(self, max_bytes: int, sent: Sequence[Mapping[str, int]] = ()) -> Iterator[list[str]]:
        """Names of tensors of which no rank of an engine has more than ``max_bytes``, if it has several.

        Args:
            sent: bytes by name that have to stay below that as well.
        """
        names: list[str] = []
        used: list[int] = []
        for name, size in self._nbytes.items():
            sizes = [size, *(each.get(name, 0) for each in sent)]
            total = [old + new for old, new in zip(used or [0] * len(sizes), sizes, strict=True)]
            if names and max(total) > max_bytes:
                yield names
                names, total = [], sizes
            names.append(name)
            used = total
        if names:
            yield names
