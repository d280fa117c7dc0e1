"""The weights of a model for whatever carries them away: first what there is, then the tensors."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from slime.models.blocks import Block
from slime.models.served_layout import ServedTensor

NamedTensors = list[tuple[str, torch.Tensor]]
"""(Hugging Face name, full tensor) pairs."""

FULL = "full"
"""The form of weights in which every tensor of the model is whole, with what adapters add in it."""
BASE = "base"
"""The form in which every tensor of the model is whole, without what adapters add."""
ADAPTER = "adapter"
"""The form in which there are the low-rank adapters alone."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor that is to come.

    Attributes:
        name: in Hugging Face checkpoints.
        shape: of the full tensor.
        shard: (dimension, parts) if trainer ranks hold parts of it that are neighbours along a dimension.
        owner: the pipeline stage whose ranks hold it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    shard: tuple[int, int] | None = None
    owner: int = 0

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class Weights(Protocol):
    """A model's weights in some form under Hugging Face names, whatever the parallel layout.

    Attributes:
        ranks: the global ranks that have to iterate in step with this one, itself included.
    """

    ranks: frozenset[int]

    @property
    def rounding(self) -> float:
        """Norm of what rounding took from what adapters add, in the last `buckets`, over the norm of that; 0
        where nothing was added, or in float32.
        """

    def manifest(self) -> Sequence[TensorInfo]:
        """All tensors that `buckets` gives, in its order. Needs no other rank and moves nothing."""

    def buckets(self, max_bytes: int) -> Iterator[NamedTensors]:
        """Lists of at most ``max_bytes`` each, a larger tensor alone. Do not write to them."""


class StagedWeights(Weights, Protocol):
    """Weights whose pipeline stages can be given side by side.

    Attributes:
        stage: of this rank.
    """

    stage: int

    def own_buckets(self, max_bytes: int) -> Iterator[NamedTensors]:
        """Gives, as `buckets` does, the tensors of this rank's stage alone, in the order of the manifest.

        The ranks of a copy's stage iterate in step with each other, and with no others.
        """


class HeldTensor(NamedTuple):
    """A parameter of a trainer rank.

    Attributes:
        blocks: what it has of tensors of a checkpoint; all else in it is padding.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[Block, ...]


class ShardedWeights(Weights, Protocol):
    """Weights of which each rank can say what it holds, and give it ungathered."""

    def held(self) -> Sequence[HeldTensor]:
        """The parameters of this rank.

        Raises:
            ValueError: one holds its tensors in no simple order.
        """

    def parts(self) -> Callable[[str], torch.Tensor]:
        """What gives the values of a parameter of this rank by name, in one update. Do not write to them."""

    def served(self, rank: int, size: int) -> Sequence[ServedTensor]:
        """The parameters of an engine's rank ``rank`` of ``size``.

        Raises:
            ValueError: see `slime.models.served_layout`.
        """


class Selected:
    """Weights that are put in place before they are read, as those of one adapter of several."""

    def __init__(self, weights: Weights, select: Callable[[], None]) -> None:
        self._weights, self._select, self.ranks = weights, select, weights.ranks

    @property
    def rounding(self) -> float:
        return self._weights.rounding

    def manifest(self) -> Sequence[TensorInfo]:
        return self._weights.manifest()

    def buckets(self, max_bytes: int) -> Iterator[NamedTensors]:
        self._select()
        yield from self._weights.buckets(max_bytes)


def require_form(form: str, *known: str) -> None:
    """Refuses a form of weights that a trainer does not have.

    Raises:
        ValueError: ``form`` is none of ``known``.
    """
    if form not in known:
        raise ValueError(f"weights: form {form!r} (wanted: {' or '.join(known)})")
