"""Context parallelism: what each rank holds of a packed row, and how per-row values come back whole.

Zigzag: every segment is padded to a multiple of 2 * size and cut into 2 * size chunks; rank r has the chunks
r and 2 * size - 1 - r. Late tokens attend to more keys than early ones, so this gives all ranks equal work.
Contiguous: the whole row is cut into ``size`` stretches, wherever segments end.

Losses and users' hooks see whole responses, the same ones on every rank of the group: `ResponseRows.gather`
joins what the ranks have. As each rank then computes the same loss, the gradient of a rank's own rows is its
part of the loss's gradient, and nothing is summed on the way back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from slime.training.parallel import ParallelContext


class Piece(NamedTuple):
    """Rows ``begin:end`` of a packed row, all of the segment that starts at row ``segment``."""

    segment: int
    begin: int
    end: int


@dataclass(frozen=True)
class RowSplit:
    """How a packed row of segments is split over the ranks of a context-parallel group.

    Attributes:
        lengths: of the segments, padding included.
    """

    lengths: tuple[int, ...]
    size: int = 1
    rank: int = 0
    contiguous: bool = False

    @classmethod
    def of(cls, lengths: Sequence[int], context: ParallelContext) -> "RowSplit":
        return cls(tuple(lengths), context.cp_size, context.cp_rank, context.contiguous_cp)

    @cached_property
    def pieces(self) -> list[Piece]:
        """What this rank has, in the order in which it has it; empty pieces are left out."""
        return self._pieces_of(self.rank)

    def _pieces_of(self, rank: int) -> list[Piece]:
        segments, start = [], 0
        for length in self.lengths:
            segments.append((start, start + length))
            start += length
        if self.contiguous or self.size == 1:
            first, last = start * rank // self.size, start * (rank + 1) // self.size
            cut = [Piece(a, max(a, first), min(b, last)) for a, b in segments]
        else:
            cut = [piece for a, b in segments for piece in self._zigzag(a, b, rank)]
        return [piece for piece in cut if piece.end > piece.begin]

    def _zigzag(self, start: int, end: int, rank: int) -> list[Piece]:
        chunk, rest = divmod(end - start, 2 * self.size)
        if rest:
            raise ValueError(f"a segment of {end - start} rows: wanted a multiple of {2 * self.size}")
        begins = [start + chunk * index for index in (rank, 2 * self.size - 1 - rank)]
        return [Piece(start, begin, begin + chunk) for begin in begins]

    @cached_property
    def rows(self) -> torch.Tensor:
        """The rows of this rank: [T / size] int64."""
        return _rows(self.pieces)

    @cached_property
    def slots(self) -> torch.Tensor:
        """Returns where each row is when the parts of all ranks lie one after the other: [T] int64."""
        rows = torch.cat([_rows(self._pieces_of(rank)) for rank in range(self.size)])
        slots = torch.empty_like(rows)
        slots[rows] = torch.arange(len(rows))
        return slots

    def take(self, row: torch.Tensor) -> torch.Tensor:
        """This rank's part of a packed row: [T, ...] to [T / size, ...]."""
        return row if self.size == 1 else row[self.rows.to(row.device)]


def _rows(pieces: Sequence[Piece]) -> torch.Tensor:
    return torch.cat([torch.arange(piece.begin, piece.end) for piece in pieces])


def segment_multiple(context: ParallelContext) -> int:
    """Each segment of a packed row is padded to a multiple of this."""
    return 1 if context.contiguous_cp or context.cp_size == 1 else 2 * context.cp_size


def row_multiple(context: ParallelContext, pad_multiple: int) -> int:
    """A packed row is padded to a multiple of this, so that each rank has a multiple of ``pad_multiple``."""
    return lcm(segment_multiple(context), pad_multiple * context.cp_size)


@dataclass(frozen=True)
class ResponseRows:
    """The rows of this rank's logits that predict response tokens: P - 1 ... L - 2 of each sequence.

    Attributes:
        local: [n] int64, the rows within this rank's part.
        targets: [n] int64, the tokens that they predict.
        lengths: response tokens of each sample.
    """

    local: torch.Tensor
    targets: torch.Tensor
    lengths: list[int]
    _gathering: "Gathering | None" = None

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Values at the ``local`` rows of all ranks, per sample: [n, ...] to whole responses [R, ...].

        Collective over the context-parallel group, and differentiable: see the top of this module.
        """
        if self._gathering is not None:
            parts = AllGather.apply(values, self._gathering.counts, self._gathering.group)
            values = parts.index_select(0, self._gathering.places.to(parts.device))
        return list(values.split(self.lengths))


@dataclass(frozen=True)
class Gathering:
    """``counts``: values that each rank gives. ``places``: where each row is in the padded parts of all."""

    counts: list[int]
    places: torch.Tensor
    group: dist.ProcessGroup

    @classmethod
    def of(cls, owner: torch.Tensor, size: int, group: dist.ProcessGroup) -> "Gathering":
        """``owner``: [n] int64, the rank that has each row; every rank has its rows in this order."""
        counts = torch.bincount(owner, minlength=size).tolist()
        places = torch.empty_like(owner)
        for rank, count in enumerate(counts):
            places[owner == rank] = rank * max(counts) + torch.arange(count)
        return cls(counts, places, group)


def response_rows(batch: Mapping[str, Any], context: ParallelContext, device: torch.device) -> ResponseRows:
    """Returns the response rows of a micro-batch of `packed_micro_batch`."""
    sequences, lengths = batch["unconcat_tokens"], list(batch["response_lengths"])
    segments = [len(tokens) for tokens in sequences] if context.cp_size == 1 else batch["segment_lengths"]
    rows, targets, start = [], [], 0
    where = device if context.cp_group is None else torch.device("cpu")
    for i, (tokens, response) in enumerate(zip(sequences, lengths, strict=True)):
        end = start + len(tokens) - 1
        rows.append(torch.arange(end - response, end, device=where))
        targets.append(tokens[len(tokens) - response :])
        start += segments[i]
    row, target = torch.cat(rows), torch.cat(targets)
    if context.cp_group is None:
        return ResponseRows(row, target, lengths)
    slots = RowSplit.of(segments, context).slots
    part, slot = len(slots) // context.cp_size, slots[row]
    owner, here = slot // part, (slot // part == context.cp_rank).nonzero().flatten()
    gathering = Gathering.of(owner, context.cp_size, context.cp_group)
    return ResponseRows((slot % part)[here].to(device), target[here.to(device)], lengths, gathering)


class AllGather(torch.autograd.Function):
    """The parts of all ranks, each padded to the longest: [n, ...] to [size * max n, ...].

    Backwards each rank takes what belongs to its own part, without communication.
    """

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, counts: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        longest = max(counts)
        ctx.begin, ctx.count = dist.get_rank(group) * longest, len(part)
        padded = part.new_zeros(longest, *part.shape[1:])
        padded[: len(part)] = part
        everywhere = part.new_empty(len(counts) * longest, *part.shape[1:])
        if longest:
            dist.all_gather_into_tensor(everywhere, padded, group=group)
        return everywhere

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        return gradient[ctx.begin : ctx.begin + ctx.count], None, None
