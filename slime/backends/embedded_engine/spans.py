"""Which rows of a cache attention may take together, so that each row's result is the same in any company."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

_BLOCK = 64


class Span(NamedTuple):
    """Rows ``start:end``, which look at the first ``length`` tokens of the cache."""

    start: int
    end: int
    length: int


def spans_of(positions: list[int]) -> list[Span]:
    """Neighbours that look at the same length of the cache.

    The length follows from a row's own position alone, because the order in which attention sums
    follows from the length.
    """
    spans: list[Span] = []
    for row, position in enumerate(positions):
        length = (position // _BLOCK + 1) * _BLOCK
        if spans and spans[-1].length == length:
            spans[-1] = spans[-1]._replace(end=row + 1)
        else:
            spans.append(Span(row, row + 1, length))
    return spans


def of_length(cached: torch.Tensor, length: int) -> torch.Tensor:
    """The first ``length`` tokens of ``[B, kv_heads, T, D]``; a cache near its limit may hold fewer."""
    missing = length - cached.shape[2]
    return F.pad(cached, (0, 0, 0, missing)) if missing > 0 else cached[:, :, :length]
