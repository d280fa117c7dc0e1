"""What a model computes of a micro-batch in one pass: sequences packed into one row, and their media."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from slime.training.context_parallel import RowSplit, row_multiple, segment_multiple
from slime.training.packed_layout import PackedLayout
from slime.training.parallel import ParallelContext
from slime.utils.model_inputs import SequenceInputs, media_names


class Ragged(NamedTuple):
    """Entries of all sequences, one sequence after the other.

    ``values``: [N, ...]. ``lengths``: how many are of each sequence; none of some, it may be.
    """

    values: torch.Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, entries: Sequence[torch.Tensor]) -> "Ragged":
        return cls(torch.cat(list(entries)), tuple(map(len, entries)))


@dataclass(frozen=True)
class PackedInputs:
    """The inputs of one forward pass, as far as this rank computes them.

    Padding is token 0: at the end of sequences where context parallelism wants it, and one more segment that
    makes each rank's part as long as it has to be.

    Attributes:
        tokens: [1, T / cp] int64.
        padding: [1, T / cp] bool, True for padding.
        split: the segments of the whole row, padding included, and what of it is this rank's.
        placed: [k, T / cp] int64, the places of tokens on k axes where sequences bring them; None for text.
        media: by name what is no token, of all sequences: whole on every context-parallel rank.
    """

    tokens: torch.Tensor
    padding: torch.Tensor
    split: RowSplit
    placed: torch.Tensor | None = None
    media: Mapping[str, Ragged] = field(default_factory=dict)

    @classmethod
    def of(
        cls, sequences: Sequence[SequenceInputs], context: ParallelContext, pad_multiple: int = 1
    ) -> "PackedInputs":
        """Packs sequences, whose ids are tensors, in their order.

        Args:
            pad_multiple: each rank's part becomes a multiple of this.
        """
        ids: list[torch.Tensor] = [one.ids for one in sequences]
        split = RowSplit.of(_segments([len(one) for one in ids], context, pad_multiple), context)
        real = packed([torch.ones_like(one, dtype=torch.bool) for one in ids], split)
        media = {name: Ragged.of(_of_each(sequences, name)) for name in media_names(sequences)}
        return cls(packed(ids, split), ~real, split, _places(sequences, split), media)

    @cached_property
    def layout(self) -> PackedLayout:
        """Where segments begin and end, for attention within them."""
        return PackedLayout.of_split(self.split, self.tokens.device, self.placed)

    def refuse_media(self, model: str) -> None:
        """Tells that a model would leave something out.

        Raises:
            ValueError: there is more than tokens.
        """
        if self.media:
            raise ValueError(
                f"{model} computes tokens only, but samples have {', '.join(self.media)} (wanted: a model "
                "that reads them, or samples without)"
            )


def packed(values: Sequence[torch.Tensor], split: RowSplit) -> torch.Tensor:
    """Packs values of each sequence's tokens, [L] each: [1, T / cp], this rank's part, with 0 for padding."""
    parts = []
    for value, length in zip(values, split.lengths, strict=False):
        parts += [value, value.new_zeros(length - len(value))]
    parts += [values[0].new_zeros(length) for length in split.lengths[len(values) :]]
    return split.take(torch.cat(parts))[None]


def _segments(lengths: Sequence[int], context: ParallelContext, pad_multiple: int) -> list[int]:
    segments = [length + -length % segment_multiple(context) for length in lengths]
    rest = -sum(segments) % row_multiple(context, pad_multiple)
    return [*segments, rest] if rest else segments


def _places(sequences: Sequence[SequenceInputs], split: RowSplit) -> torch.Tensor | None:
    """[k, T / cp]; a text among others has the same place on all axes."""
    given = [one.positions for one in sequences if one.positions is not None]
    if not given:
        return None
    axes = torch.atleast_2d(given[0]).size(0)
    places = [
        torch.arange(len(one.ids), device=one.ids.device).expand(axes, -1)
        if one.positions is None
        else torch.atleast_2d(one.positions)
        for one in sequences
    ]
    return torch.cat([packed([place[axis] for place in places], split) for axis in range(axes)])


def _of_each(sequences: Sequence[SequenceInputs], name: str) -> list[torch.Tensor]:
    """What each sequence has under a name: nothing, in the form of the others, where it has none."""
    form = next(one.media[name] for one in sequences if name in one.media)
    return [one.media.get(name, form[:0]) for one in sequences]
