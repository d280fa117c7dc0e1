"""Parts of tensors: rectangles of them, and where they lie in others.

A vector counts as a matrix of one column; of more than two dimensions all but the last count as rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Area(NamedTuple):
    """A rectangle of a matrix."""

    rows: range
    columns: range

    @property
    def size(self) -> int:
        return len(self.rows) * len(self.columns)

    def common(self, other: Area) -> Area | None:
        """What both have; None if that is nothing."""
        rows, columns = _common(self.rows, other.rows), _common(self.columns, other.columns)
        return Area(rows, columns) if rows and columns else None

    def without(self, part: Area) -> Iterator[Area]:
        """The rest of it beside a part of it."""
        above, below = range(self.rows.start, part.rows.start), range(part.rows.stop, self.rows.stop)
        left = range(self.columns.start, part.columns.start)
        right = range(part.columns.stop, self.columns.stop)
        rest = [Area(above, self.columns), Area(below, self.columns)]
        rest += [Area(part.rows, left), Area(part.rows, right)]
        return (area for area in rest if area.size)

    def of(self, matrix: torch.Tensor) -> torch.Tensor:
        """The view of these numbers of a matrix."""
        return matrix[self.rows.start : self.rows.stop, self.columns.start : self.columns.stop]


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


class Block(NamedTuple):
    """A rectangle of a tensor of a checkpoint, and where it lies in another tensor.

    Attributes:
        name: of the tensor of a checkpoint.
        area: of that one.
        row, column: of its first number in the other tensor.
    """

    name: str
    area: Area
    row: int
    column: int = 0

    def place(self, part: Area) -> Area:
        """Where a part of the area lies in the other tensor."""
        row = self.row + part.rows.start - self.area.rows.start
        column = self.column + part.columns.start - self.area.columns.start
        return Area(range(row, row + len(part.rows)), range(column, column + len(part.columns)))

    def origin(self, part: Area) -> Area:
        """The part of the area that a part of the other tensor is of; the reverse of `place`."""
        row = self.area.rows.start + part.rows.start - self.row
        column = self.area.columns.start + part.columns.start - self.column
        return Area(range(row, row + len(part.rows)), range(column, column + len(part.columns)))


def matrix_size(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor of that shape."""
    if len(shape) < 2:
        return (shape[0] if shape else 1), 1
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, shape[-1]


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a matrix, which shares its memory."""
    return tensor.view(matrix_size(tuple(tensor.shape)))


def whole(shape: tuple[int, ...]) -> Area:
    """All of a tensor of that shape."""
    rows, columns = matrix_size(shape)
    return Area(range(rows), range(columns))
