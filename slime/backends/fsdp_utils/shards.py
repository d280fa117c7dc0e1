"""What the first rank reads, and every rank's part of it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from slime.backends.fsdp_utils.optimizer import local

_T = TypeVar("_T")


def on_first_rank(path: str | Path, action: Callable[[], _T]) -> _T | None:
    """Collective. What it gives on the first rank, None elsewhere; a failure is one of all ranks."""
    result, failure = None, [""]
    if dist.get_rank() == 0:
        try:
            result = action()
        except Exception as error:  # whatever the others wait for will not come
            failure = [str(error) or type(error).__name__]
    dist.broadcast_object_list(failure, src=0)
    if failure[0]:
        raise ValueError(f"{path}: {failure[0]}")
    return result


def fill(tensor: torch.Tensor, value: torch.Tensor | None) -> None:
    """Gives each rank its part of ``value``, which the first rank has: equal chunks of rows, as FSDP2 has."""
    if not isinstance(tensor, DTensor):  # a buffer, which is broadcast behind the parameters
        if value is not None:
            tensor.copy_(value)
        return
    mesh, shard = tensor.device_mesh, local(tensor)
    rows = -(-tensor.size(0) // mesh.size())
    part = torch.empty(rows, *tensor.shape[1:], dtype=tensor.dtype, device=mesh.device_type)
    parts = None if value is None else list(_chunks(value.to(part), rows, mesh.size()))
    dist.scatter(part, parts, src=0)
    shard.copy_(part[: shard.size(0)])


def _chunks(value: torch.Tensor, rows: int, count: int) -> Iterator[torch.Tensor]:
    """Yields chunks of so many rows, padded by zeros."""
    for start in range(0, rows * count, rows):
        chunk = value[start : start + rows]
        yield (
            chunk
            if len(chunk) == rows
            else torch.cat([chunk, chunk.new_zeros(rows - len(chunk), *value.shape[1:])])
        )
