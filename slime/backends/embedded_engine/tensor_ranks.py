"""Ranks of tensor parallelism: each gets every weight, and keeps its slice.

The ranks share one process, which computes with the slices joined. So what arrives at one rank alone, or in
another order than at the others, is seen in what is generated, as on servers with a process for each rank.
"""

from collections.abc import Sequence

import torch

from slime.backends.embedded_engine.errors import BadRequest

Named = list[tuple[str, torch.Tensor]]


def joined(ranks: Sequence[Named]) -> Named:
    """Puts weights together from the slice of each rank: rows of a matrix, values of a vector.

    Args:
        ranks: the whole weights, as each rank got them.

    Raises:
        BadRequest: a rank has others than the first one, or of another shape or dtype.
    """
    first, *others = ranks
    for rank, named in enumerate(others, 1):
        _require_alike(first, rank, named)
    if not others:
        return first
    columns = zip(*ranks, strict=True)
    return [(column[0][0], _from_slices([tensor for _, tensor in column])) for column in columns]


def _require_alike(first: Named, rank: int, named: Named) -> None:
    if len(named) != len(first):
        raise BadRequest(f"TP rank {rank}: {len(named)} tensors (wanted: {len(first)}, as on rank 0)")
    for (name, tensor), (other_name, other) in zip(first, named, strict=True):
        wanted, found = (name, tensor.dtype, tensor.shape), (other_name, other.dtype, other.shape)
        if wanted != found:
            raise BadRequest(f"TP rank {rank}: tensor {found} (wanted: {wanted}, as on rank 0)")


def _from_slices(whole: Sequence[torch.Tensor]) -> torch.Tensor:
    if whole[0].dim() == 0:
        return whole[0]
    return torch.cat([tensor.tensor_split(len(whole))[rank] for rank, tensor in enumerate(whole)])
