"""What a trainer rank sends a rank of an engine in a bucket, as both name it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from slime.models.blocks import Area
from slime.utils.tensor_bucket import FlattenedTensorMetadata, layout


class Piece(NamedTuple):
    """Numbers that become part of a tensor of an engine's rank.

    Attributes:
        area: of that tensor.
    """

    tensor: str
    dtype: torch.dtype
    area: Area

    @property
    def name(self) -> str:
        rows, columns = self.area
        return f"{self.tensor}, rows {rows.start} to {rows.stop}, columns {columns.start} to {columns.stop}"


class Message(NamedTuple):
    """Pieces, back to back.

    Attributes:
        source: the trainer rank.
    """

    source: int
    pieces: tuple[Piece, ...]

    def spans(self) -> list[FlattenedTensorMetadata]:
        """Where each of them lies."""
        sizes = ((len(one.area.rows), len(one.area.columns)) for one in self.pieces)
        return layout([(one.name, one.dtype, size) for one, size in zip(self.pieces, sizes, strict=True)])

    def as_json(self) -> dict[str, Any]:
        pieces = [
            {
                "tensor": one.tensor,
                "dtype": str(one.dtype).removeprefix("torch."),
                "rows": [one.area.rows.start, one.area.rows.stop],
                "columns": [one.area.columns.start, one.area.columns.stop],
            }
            for one in self.pieces
        ]
        return {"source": self.source, "pieces": pieces}


def label(kind: int, piece: Piece) -> str:
    """The name of a piece among those of all kinds of engine ranks."""
    return f"{kind}: {piece.name}"


def kind_of(label: str) -> int:
    return int(label.partition(": ")[0])


def of_kind(labelled: Sequence[Mapping[str, Any]], kind: int) -> dict[str, Any]:
    """What there is for the pieces of a kind, by their own names, of all trainer ranks."""
    prefix = f"{kind}: "
    return {
        name.removeprefix(prefix): value
        for each in labelled
        for name, value in each.items()
        if name.startswith(prefix)
    }
