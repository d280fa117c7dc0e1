"""The boundaries of the sequences in a packed row."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slime.training.padded_groups import note_places, padded_rows, similar


@dataclass(frozen=True)
class Padded:
    """Sequences of similar length, side by side.

    Attributes:
        rows: [count * length] int64, the row of the packed batch in each place; places that pad have row 0.
    """

    rows: torch.Tensor
    count: int
    length: int

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """[T, ...] in packed order -> [count, length, ...]."""
        return values.index_select(0, self.rows).unflatten(0, (self.count, self.length))


class Segments:
    """The layout of a packed row, computed once for all layers.

    Attributes:
        positions: [T] int64, of each token within its sequence.
        boundaries: [sequences + 1] int32, cumulative lengths.
        longest: the largest length.
        groups: the sequences in groups of similar length, the longest first.
        whole: all of them in one group, in packed order.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        lengths = [length for length in lengths if length]
        ends = torch.tensor([0, *lengths]).cumsum(0)
        self._starts, self._lengths, self._device = ends[:-1].tolist(), lengths, device
        self.positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        self.boundaries = ends.to(torch.int32).to(device)
        self.longest = max(lengths)
        self.groups, self._order = self._padded(similar([(length,) for length in lengths]))
        (self.whole,), self._whole_order = self._padded([range(len(lengths))])

    def packed(self, groups: Sequence[torch.Tensor]) -> torch.Tensor:
        """Values of each of ``groups``, [count, length, ...], as [T, ...] in packed order."""
        return torch.cat([values.flatten(0, 1) for values in groups]).index_select(0, self._order)

    def packed_whole(self, values: torch.Tensor) -> torch.Tensor:
        """Packs the values of ``whole``."""
        return values.flatten(0, 1).index_select(0, self._whole_order)

    def _padded(self, groups: Sequence[Sequence[int]]) -> tuple[list[Padded], torch.Tensor]:
        """The groups, and for each packed row its place in all of them, one after the other."""
        padded, order, offset = [], torch.empty(sum(self._lengths), dtype=torch.int64), 0
        for members in groups:
            rows, real = padded_rows([self._starts[i] for i in members], [self._lengths[i] for i in members])
            note_places(order, rows, real, offset)
            padded.append(Padded(rows.where(real, 0).flatten().to(self._device), *rows.shape))
            offset += rows.numel()
        return padded, order.to(self._device)
