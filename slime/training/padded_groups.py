"""Sequences of similar length as padded batches, for attention without a kernel for packed rows."""

from collections.abc import Sequence

import torch

# Sequences are padded to the longest of their group; a group takes those at least this fraction as long.
_SIMILAR = 0.75


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
