"""Weights as SGLang's tensor-parallel ranks hold them: joined tensors, of which each rank has its part.

Here each weight is there once, whatever the number of ranks. What several ranks hold comes from all of them,
of each a part of its rows, so that what arrives at one alone is seen.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import torch

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.named_weights import NamedWeights
from slime.backends.embedded_engine.tensor_ranks import Named, require_alike
from slime.models.blocks import Area, Block, as_matrix
from slime.models.served_layout import ServedTensor, served_layout
from slime.utils.tensor_bucket import tensor_digest


class ServedShards:
    """
    Args:
        tp_size: the ranks.
    """

    def __init__(self, parameters: NamedWeights, tp_size: int = 1) -> None:
        self._parameters, self._tp_size = parameters, tp_size

    @cached_property
    def _ranks(self) -> list[dict[str, ServedTensor]]:
        shape = self._parameters.config.shape
        try:
            layouts = [served_layout(shape, shape.moe, rank, self._tp_size) for rank in range(self._tp_size)]
        except ValueError as error:
            raise BadRequest(f"tensors of ranks: {error}") from error
        return [{tensor.name: tensor for tensor in tensors} for tensors in layouts]

    @cached_property
    def _holders(self) -> dict[tuple[str, Area], list[int]]:
        """The ranks that hold a part of a weight."""
        found: dict[tuple[str, Area], list[int]] = {}
        for rank, tensors in enumerate(self._ranks):
            for tensor in tensors.values():
                for block in tensor.blocks:
                    found.setdefault((block.name, block.area), []).append(rank)
        return found

    def update(self, ranks: Sequence[Named]) -> set[str]:
        """Copies in what each rank got, and returns the names of the weights.

        Raises:
            BadRequest: ranks got different tensors, or one that does not fit; nothing is changed.
        """
        self._parameters.require_memory()
        require_alike(ranks)
        for rank, named in enumerate(ranks):
            for name, tensor in named:
                self._check(rank, name, tensor)
        names = set()
        with torch.no_grad():
            for rank, named in enumerate(ranks):
                for name, tensor in named:
                    for block in self._ranks[rank][name].blocks:
                        self._copy(rank, block, as_matrix(tensor.contiguous()))
                        names.add(block.name)
        return names

    def _check(self, rank: int, name: str, tensor: torch.Tensor) -> None:
        wanted = self.tensor(rank, name)
        if tuple(tensor.shape) != wanted.shape:
            raise BadRequest(f"tensor {name!r}: shape {list(tensor.shape)} (wanted: {list(wanted.shape)})")
        require_float(name, tensor.dtype)

    def tensor(self, rank: int, name: str) -> ServedTensor:
        """
        Raises:
            BadRequest: a rank has none of that name.
        """
        if name not in self._ranks[rank]:
            raise BadRequest(f"tensor {name!r}: a rank of this model has none of that name")
        return self._ranks[rank][name]

    def names(self, rank: int) -> Iterable[str]:
        """The tensors that a rank has."""
        return self._ranks[rank]

    def _copy(self, rank: int, block: Block, matrix: torch.Tensor) -> None:
        """Copies what this rank gives of a block."""
        area = self.given(rank, block)
        area.of(as_matrix(self._parameters.named[block.name])).copy_(block.place(area).of(matrix))

    def given(self, rank: int, block: Block) -> Area:
        """What a rank gives of a weight that it holds a block of."""
        holders = self._holders[block.name, block.area]
        part = _share(block.area.rows, holders.index(rank), len(holders))
        return Area(part, block.area.columns)

    def checksums(self) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
        """Checksums of each rank's tensors by name, and their formats.

        Raises:
            BadRequest: how ranks hold such a model is not known.
        """
        self._parameters.require_memory()
        for tensors in self._ranks:
            held = {name: self.held(tensor) for name, tensor in tensors.items()}
            digests = {name: tensor_digest(tensor) for name, tensor in held.items()}
            yield digests, {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in held.items()}

    def held(self, tensor: ServedTensor) -> torch.Tensor:
        """A tensor of a rank, by what the engine computes with."""
        config = self._parameters.config
        found = torch.zeros(tensor.shape, dtype=config.dtype, device=config.device)
        for block in tensor.blocks:
            source = as_matrix(self._parameters.named[block.name])
            block.place(block.area).of(as_matrix(found)).copy_(block.area.of(source))
        return found


def require_float(name: str, dtype: torch.dtype) -> None:
    """
    Raises:
        BadRequest: weights cannot come in this format.
    """
    if not dtype.is_floating_point or dtype.itemsize == 1:
        raise BadRequest(f"tensor {name!r}: {dtype} (wanted: a floating point dtype of 16 bits or more)")


def _share(rows: range, number: int, count: int) -> range:
    """One of so many parts of rows, which are about as large."""
    first, rest = divmod(len(rows), count)
    start = rows.start + number * first + min(number, rest)
    return range(start, start + first + (number < rest))
