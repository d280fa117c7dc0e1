"""Matrix products that are the same for a row whatever rows are beside it."""

import torch
import torch.nn.functional as F

LEAST_ROWS = 16
"""A product with fewer rows runs another kernel, whose sums are taken in another order: below 8 rows on some
processors, below 16 on others."""

VECTOR_ROWS = 32
"""Rows come in multiples of this, so that none is computed without vectors, to other last bits."""


def missing_rows(count: int) -> int:
    """How many rows make ``count`` a multiple of `VECTOR_ROWS`."""
    return -count % VECTOR_ROWS


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``F.linear`` whose every row, in float32, is the same to the last bit whatever rows are beside it.

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]``.
        bias: ``[out]``.
    """
    rows = x.numel() // x.shape[-1]
    if rows >= LEAST_ROWS:
        return F.linear(x, weight, bias)
    padded = F.pad(x.reshape(rows, -1), (0, 0, 0, LEAST_ROWS - rows))
    return F.linear(padded, weight, bias)[:rows].view(*x.shape[:-1], -1)


class RowLinear(torch.nn.Linear):
    """A layer that takes the rows of its input as one matrix: ``F.linear`` multiplies some of them apart."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = F.linear(input.reshape(-1, input.shape[-1]), self.weight, self.bias)
        return rows.view(*input.shape[:-1], -1)
