"""The boundaries of a packed batch's segments, for attention within each of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from slime.models.rope import Rope, inverse_frequencies
from slime.training.context_parallel import Piece, RowSplit

# Sequences are padded to the longest of their group; a group takes those at least this fraction as long.
_SIMILAR = 0.75


@dataclass(frozen=True)
class SegmentGroup:
    """Segments, or pieces of them, of similar length, right-padded to one batch.

    ``rows``: [segments * length] int64, the packed row of every slot. Slots that pad point to row 0: causal
    attention hides them from the real queries before them, and their outputs are dropped.
    ``key_rows``: [segments * keys] int64, likewise for keys and values; a piece has those of its segment up
    to its own end.
    ``mask``: [segments, 1, length, keys] bool, True where a query sees a key; None where each query sees the
    keys up to its own slot.
    """

    rows: torch.Tensor
    key_rows: torch.Tensor
    segments: int
    length: int
    keys: int
    mask: torch.Tensor | None

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """[rows, ...] of queries in packed order to [segments, length, ...]."""
        return values.index_select(0, self.rows).unflatten(0, (self.segments, self.length))

    def gather_keys(self, values: torch.Tensor) -> torch.Tensor:
        """[rows of all ranks, ...] of keys or values to [segments, keys, ...]."""
        return values.index_select(0, self.key_rows).unflatten(0, (self.segments, self.keys))

    def seen(self, begin: int, end: int) -> torch.Tensor:
        """[segments or 1, end - begin, keys] bool, which keys the queries of these slots see."""
        if self.mask is not None:
            return self.mask[:, 0, begin:end]
        slots = torch.arange(max(self.keys, end), device=self.rows.device)
        return (slots[: self.keys] <= slots[begin:end, None])[None]

    def within(self, window: int) -> torch.Tensor | None:
        """The mask where a query sees the last ``window`` of these keys only, its own among them."""
        if self.mask is None and window >= self.keys:
            return None
        seen = self.seen(0, self.length)[:, None]
        last = seen.sum(-1, keepdim=True) - 1
        return seen & (torch.arange(self.keys, device=seen.device) > last - window)


class Varlen(NamedTuple):
    """The layout for kernels that take boundaries and align the last query of a piece with its last key.

    ``key_rows``: [keys of all pieces] int64. ``queries``, ``keys``: [pieces + 1] int32 boundaries.
    """

    key_rows: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    max_queries: int
    max_keys: int


@dataclass
class PackedLayout:
    """The pieces of a packed batch that this rank has, computed once per micro-batch and used by every layer.

    Attributes:
        pieces: in the order of this rank's rows.
        slots: where the key of each row of the whole batch is after gathering; None if this rank has all.
        lengths: of all segments of the whole batch; empty if this rank has all.
        placed: [k, rows] int64, see ``positions``; None for text.
        left: what layers leave for later layers of the same micro-batch, by names of theirs.
    """

    pieces: list[Piece]
    device: torch.device
    slots: torch.Tensor | None = None
    lengths: tuple[int, ...] = ()
    placed: torch.Tensor | None = None
    left: dict[str, Any] = field(default_factory=dict)
    _rope: dict[tuple[Rope, int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict
    )
    _windows: dict[tuple[int, int], torch.Tensor | None] = field(default_factory=dict)

    @classmethod
    def of(cls, params: Any) -> "PackedLayout":
        """The layout that goes with megatron-core's ``PackedSeqParams``; one without gets that of its
        boundaries.
        """
        layout = getattr(params, "segment_layout", None)
        if layout is None:
            layout = cls.from_boundaries(params.cu_seqlens_q.tolist(), params.cu_seqlens_q.device)
            layout.go_with(params)
        return layout

    def go_with(self, params: Any) -> None:
        """Becomes the layout of these ``PackedSeqParams``."""
        vars(params)["segment_layout"] = self

    @classmethod
    def of_split(
        cls, split: RowSplit, device: torch.device, placed: torch.Tensor | None = None
    ) -> "PackedLayout":
        if split.size == 1:
            return cls(split.pieces, device, placed=placed)
        return cls(split.pieces, device, split.slots, split.lengths, placed)

    @classmethod
    def from_boundaries(cls, boundaries: Sequence[int], device: torch.device) -> "PackedLayout":
        """Layout of the segments ``boundaries[i]:boundaries[i + 1]``, empty ones left out."""
        return cls([Piece(a, a, b) for a, b in pairwise(boundaries) if b > a], device)

    @cached_property
    def whole(self) -> "PackedLayout":
        """Returns the layout of the whole batch, for layers that every context-parallel rank computes for all
        tokens.
        """
        if self.slots is None:
            return self
        return PackedLayout.from_boundaries([0, *accumulate(self.lengths)], self.device)

    @cached_property
    def own_rows(self) -> torch.Tensor:
        """[rows] int64, where this rank's rows are in the whole batch."""
        rows = [torch.arange(piece.begin, piece.end) for piece in self.pieces]
        return torch.cat(rows).to(self.device)

    @cached_property
    def piece_numbers(self) -> torch.Tensor:
        """[rows] int64, which of the pieces each row is of."""
        lengths = torch.tensor([piece.end - piece.begin for piece in self.pieces])
        return torch.arange(len(lengths)).repeat_interleave(lengths).to(self.device)

    @cached_property
    def num_rows(self) -> int:
        return sum(piece.end - piece.begin for piece in self.pieces)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest segment of the whole batch, on every rank the same."""
        return max(self.lengths or [piece.end - piece.segment for piece in self.pieces])

    @cached_property
    def positions(self) -> torch.Tensor:
        """[k, rows] int64, the place of each token on k axes: in text on one, that within its segment."""
        if self.placed is not None:
            return self.placed
        positions = [torch.arange(begin - segment, end - segment) for segment, begin, end in self.pieces]
        return torch.cat(positions).to(self.device)[None]

    def rope(self, rope: Rope, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the angles of ``width`` rotated features: [rows, 1, width] each.

        Raises:
            ValueError: tokens are placed on more than one axis.
        """
        key = rope, width, dtype
        if key not in self._rope:
            if len(self.positions) != 1:
                raise ValueError(f"positions on {len(self.positions)} axes: this rotation knows 1")
            frequencies = inverse_frequencies(rope, width).to(self.device)
            angles = torch.outer(self.positions[0].float(), frequencies)
            pairs = angles.repeat_interleave(2, -1) if rope.interleaved else torch.cat([angles, angles], -1)
            cos, sin = (x[:, None] * rope.magnitude for x in (pairs.cos(), pairs.sin()))
            self._rope[key] = cos.to(dtype), sin.to(dtype)
        return self._rope[key]

    def mask(self, number: int, window: int | None) -> torch.Tensor | None:
        """Returns the mask of a group for layers whose queries see so many keys, None standing for all."""
        if window is None:
            return self.groups[number].mask
        if (number, window) not in self._windows:
            self._windows[number, window] = self.groups[number].within(window)
        return self._windows[number, window]

    @property
    def groups(self) -> list[SegmentGroup]:
        """The pieces as padded batches."""
        return self._grouping[0]

    @property
    def order(self) -> torch.Tensor | None:
        """[rows] int64, for each row its slot in the concatenated outputs of ``groups``.

        None if there is one group whose rows are this rank's rows, and its keys as well.
        """
        return self._grouping[1]

    @cached_property
    def _grouping(self) -> tuple[list[SegmentGroup], torch.Tensor | None]:
        groups, order = self._padded(similar_lengths(self.pieces))
        identity = torch.equal(order, torch.arange(sum(len(group.rows) for group in groups)))
        if len(groups) == 1 and self.slots is None and identity:
            return groups, None
        return groups, order.to(self.device)

    @cached_property
    def one_group(self) -> tuple[SegmentGroup, torch.Tensor]:
        """Returns all pieces as one padded batch, in packed order, and [rows] int64, the slot of each row."""
        (group,), order = self._padded([self.pieces])
        return group, order.to(self.device)

    def _padded(self, batches: Sequence[Sequence[Piece]]) -> tuple[list[SegmentGroup], torch.Tensor]:
        """Padded batches of pieces, and for each row its slot in all of them, one after the other."""
        lengths = [piece.end - piece.begin for piece in self.pieces]
        starts = dict(zip(self.pieces, accumulate([0, *lengths[:-1]]), strict=True))
        order, offset = torch.empty(self.num_rows, dtype=torch.int64), 0
        groups = []
        for members in batches:
            queries = [piece.end - piece.begin for piece in members]
            rows, real = padded_rows([starts[piece] for piece in members], queries)
            note_places(order, rows, real, offset)
            groups.append(self._group(members, rows.where(real, 0), queries))
            offset += rows.numel()
        return groups, order

    @cached_property
    def varlen(self) -> Varlen:
        """Returns the layout for kernels that take boundaries."""
        queries = [piece.end - piece.begin for piece in self.pieces]
        keys = [piece.end - piece.segment for piece in self.pieces]
        rows = torch.cat([torch.arange(piece.segment, piece.end) for piece in self.pieces])
        return Varlen(
            self._gathered(rows), self._boundaries(queries), self._boundaries(keys), max(queries), max(keys)
        )

    def _boundaries(self, lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.device)

    def _gathered(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows if self.slots is None else self.slots[rows]).to(self.device)

    def _group(self, members: Sequence[Piece], rows: torch.Tensor, queries: list[int]) -> SegmentGroup:
        keys = [piece.end - piece.segment for piece in members]
        key_rows, real = padded_rows([piece.segment for piece in members], keys)
        (segments, length), width, mask = rows.shape, key_rows.size(1), None
        if queries != keys:
            before = torch.tensor(keys) - torch.tensor(queries)
            last_seen = before[:, None, None] + torch.arange(length)[:, None]
            mask = (torch.arange(width) <= last_seen)[:, None].to(self.device)
        gathered = self._gathered(key_rows.where(real, 0).flatten())
        return SegmentGroup(rows.flatten().to(self.device), gathered, segments, length, width, mask)


def similar_lengths(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Groups of pieces, by their keys and their queries; equally long pieces stay in packed order."""
    groups = similar([(piece.end - piece.segment, piece.end - piece.begin) for piece in pieces])
    return [[pieces[i] for i in group] for group in groups]


def similar(sizes: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Splits sequences into groups, the longest first, that waste little when padded to their longest.

    Args:
        sizes: of each sequence in every dimension that is padded, for instance its keys and its queries.

    Returns:
        Indices into ``sizes``; those of equal sizes stay in order.
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(sizes)), key=lambda i: [-size for size in sizes[i]]):
        if groups and _alike(sizes[groups[-1][0]], sizes[i]):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _alike(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    return all(min(pair) >= _SIMILAR * max(pair) for pair in zip(first, second, strict=True))


def padded_rows(starts: Sequence[int], lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """[count, longest] int64 rows from each start on, and bool whether a length covers them."""
    offsets = torch.arange(max(lengths))
    return torch.tensor(starts)[:, None] + offsets, offsets < torch.tensor(lengths)[:, None]


def note_places(order: torch.Tensor, rows: torch.Tensor, real: torch.Tensor, offset: int) -> None:
    """Writes to ``order``, at each real one of ``rows``, its place among all places of the padded batches.

    Args:
        order: [T] int64.
        rows, real: of one batch, see `padded_rows`.
        offset: places of the batches before it.
    """
    order[rows[real]] = real.flatten().nonzero().flatten() + offset
