"""Ranks of tensor parallelism: each gets every weight, and keeps its slice (see `served_shards` else).

The ranks share one process, which computes with the slices joined. So what arrives at one rank alone, or in
another order than at the others, is seen in what is generated, as on servers with a process for each rank.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from slime.backends.embedded_engine.errors import BadRequest
from slime.utils.tensor_bucket import FlattenedTensorBucket, FlattenedTensorMetadata

Named = list[tuple[str, torch.Tensor]]


def joined(ranks: Sequence[Named]) -> Named:
    """Puts weights together from the slice of each rank: rows of a matrix, values of a vector.

    Args:
        ranks: the whole weights, as each rank got them.

    Raises:
        BadRequest: a rank has others than the first one, or of another shape or dtype.
    """
    require_alike(ranks)
    first = ranks[0]
    if len(ranks) == 1:
        return first
    columns = zip(*ranks, strict=True)
    return [(column[0][0], _from_slices([tensor for _, tensor in column])) for column in columns]


def tensors_of(flat: torch.Tensor, entries: list[FlattenedTensorMetadata]) -> Named:
    """The tensors that lie in a buffer, whose memory they share."""
    return FlattenedTensorBucket(flattened_tensor=flat, metadata=entries).reconstruct_tensors()


@contextmanager
def refused() -> Iterator[None]:
    """Has the client told what is wrong with what it sent."""
    try:
        yield
    except BadRequest:
        raise
    except ValueError as error:
        raise BadRequest(str(error)) from error


def require_alike(ranks: Sequence[Named]) -> None:
    """
    Raises:
        BadRequest: a rank has other tensors than the first one, or of another shape or dtype.
    """
    first, *others = ranks
    for rank, named in enumerate(others, 1):
        _require_alike(first, rank, named)


def named_tensors(payload: Any, load_format: str | None) -> Named:
    """The tensors of a request: pairs, or by name as those of an adapter are.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: they are none.
    """
    if load_format == "flattened_bucket":
        payload = FlattenedTensorBucket(
            flattened_tensor=payload["flattened_tensor"], metadata=payload["metadata"]
        ).reconstruct_tensors()
    pairs = payload.items() if isinstance(payload, dict) else payload
    named = [(name, tensor) for name, tensor in pairs]
    for name, tensor in named:
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise TypeError("wanted a list of (name, tensor) pairs")
    return named


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
