"""Numbers from trainer ranks that hold them to those that hand them over."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from slime.models.blocks import as_matrix
from slime.utils.tensor_bucket import FlattenedTensorBucket, layout
from slime.weight_sync.shards.moves import Move

Part = Callable[[str], torch.Tensor]
"""Gives a parameter of this rank by name."""


class Told(NamedTuple):
    """What this rank sends to one other, or receives from it, in order."""

    peer: int
    moves: Sequence[Move]


class Exchange:
    """The messages of a bucket: one to each rank that needs something, one from each that has something.

    Args:
        dtypes: of the tensors of a checkpoint.
    """

    def __init__(
        self, sends: Sequence[Told], receives: Sequence[Told], dtypes: dict[str, torch.dtype]
    ) -> None:
        self._sends, self._receives = sends, receives
        self._layouts = {
            told.peer: layout([(str(i), dtypes[m.name], _size(m)) for i, m in enumerate(told.moves)])
            for told in receives
        }

    def run(
        self, part: Part, group: dist.ProcessGroup | None, device: torch.device
    ) -> dict[Move, torch.Tensor]:
        """Sends and receives, in step with the others; returns what came."""
        buffers = {
            peer: torch.empty(entries[-1].end_idx, dtype=torch.uint8, device=device)
            for peer, entries in self._layouts.items()
        }
        messages = [dist.P2POp(dist.irecv, buffer, peer, group) for peer, buffer in buffers.items()]
        packed = [_packed(part, told.moves) for told in self._sends]
        messages += [
            dist.P2POp(dist.isend, data, told.peer, group)
            for told, data in zip(self._sends, packed, strict=True)
        ]
        works = dist.batch_isend_irecv(messages) if messages else []
        for work in works:
            work.wait()
        found: dict[Move, torch.Tensor] = {}
        for told in self._receives:
            flat = FlattenedTensorBucket(
                flattened_tensor=buffers[told.peer], metadata=self._layouts[told.peer]
            )
            pieces = (tensor for _, tensor in flat.reconstruct_tensors())
            found |= dict(zip(told.moves, pieces, strict=True))
        return found


def _size(move: Move) -> tuple[int, int]:
    return len(move.taken.rows), len(move.taken.columns)


def _packed(part: Part, moves: Sequence[Move]) -> torch.Tensor:
    pieces = [move.taken.of(as_matrix(part(move.held))) for move in moves]
    return torch.cat([piece.contiguous().view(-1).view(torch.uint8) for piece in pieces])
