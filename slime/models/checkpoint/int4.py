"""Matrices of 4-bit integers, eight to an int32, with one scale for each group of neighbours in a row.

The layout is compressed-tensors' ``pack-quantized``: weight = (nibble - 8) x scale, lowest bits first.
"""

import torch

from slime.models.checkpoint.stored_scale import divisor, is_kept

PER_WORD = 8
_SMALLEST, _LARGEST = -8, 7
# Numbers of a kept group are up to half a scale beyond the codes; and the scale, in bfloat16, is off by 2^-9.
_SLACK = 1 + 2.0**-8


def quantize(
    weight: torch.Tensor,
    group: int,
    scale_dtype: torch.dtype | None = None,
    stored: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Words int32 [O, I / 8] and scales [O, I / group].

    The integers are -7 to 7, and -8 to 7 with a scale that is kept: without -8 what is quantised again stays
    the same. A group of zeros has the scale 1. An error is at most half a scale.

    Args:
        weight: [O, I] of finite floats.
        scale_dtype: format of the scales; default that of ``weight``.
        stored: scales of a checkpoint, in that format, which groups keep (`is_kept`).

    Raises:
        ValueError: a number is not finite, or I is no multiple of ``group``.
    """
    rows, columns = weight.shape
    dtype = scale_dtype or weight.dtype
    if columns % group:
        raise ValueError(f"has {columns} columns, no multiple of a group of {group}")
    values = weight.float().view(rows, columns // group, group)
    largest = values.abs().amax(dim=2)
    if not bool(torch.isfinite(largest).all()):
        raise ValueError("has numbers that are not finite")
    scale = (largest / _LARGEST).clamp(min=torch.finfo(dtype).tiny).to(dtype)
    scale = torch.where(largest == 0, torch.ones_like(scale), scale)
    if stored is not None:
        scale = torch.where(_kept(values, stored, weight.dtype), stored, scale)
    codes = _rounded(values, scale)
    return pack(codes.view(rows, columns).to(torch.int32)), scale


def _rounded(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.round(values / divisor(scale)[..., None]).clamp(_SMALLEST, _LARGEST)


def _kept(values: torch.Tensor, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The groups [O, I / group] whose numbers [O, I / group, group] keep their scale."""
    scaled = values / divisor(stored)[..., None]
    low, high = scaled.amin(dim=2) / (_SMALLEST - 0.5), scaled.amax(dim=2) / (_LARGEST + 0.5)
    back = (_rounded(values, stored) * stored.float()[..., None]).to(dtype)
    moved = (back != values.to(dtype)).any(dim=2)
    return is_kept(torch.maximum(low, high) / _SLACK, moved, stored)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Integers -8 to 7 [O, I] as int32 [O, I / 8], rounded up."""
    nibbles = torch.nn.functional.pad(codes.int() + 8, (0, -codes.shape[1] % PER_WORD))
    nibbles = nibbles.view(codes.shape[0], -1, PER_WORD)
    words = torch.zeros(nibbles.shape[:2], dtype=torch.int32, device=codes.device)
    for place in range(PER_WORD):
        words |= nibbles[..., place] << (4 * place)
    return words


def unpack(words: torch.Tensor) -> torch.Tensor:
    """Integers -8 to 7, int32 [O, 8 I], of words int32 [O, I]."""
    places = torch.arange(PER_WORD, dtype=torch.int32, device=words.device) * 4
    return (((words[..., None] >> places) & 15) - 8).view(words.shape[0], -1)


def dequantize(codes: torch.Tensor, scale: torch.Tensor, group: int, first: int) -> torch.Tensor:
    """Float32 [O, I] of integers from column ``first`` on, ``scale`` being that of the groups they touch."""
    at = torch.arange(first, first + codes.shape[1], device=codes.device) // group - first // group
    return codes.float() * scale.float().index_select(1, at)
