"""Matrix products that are the same for a row whatever rows are beside it."""

import torch
import torch.nn.functional as F

LEAST_ROWS = 8
"""A product with fewer rows runs another kernel, whose sums are taken in another order."""


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
