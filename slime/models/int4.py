"""Matrices of 4-bit integers, eight to an int32, with one scale for each group of neighbours in a row.

The layout is compressed-tensors' ``pack-quantized``: weight = (nibble - 8) x scale, lowest bits first.
"""

import torch

PER_WORD = 8
_LARGEST = 7


def quantize(
    weight: torch.Tensor, group: int, scale_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Words int32 [O, I / 8] and scales [O, I / group].

    The integers are -7 to 7: without -8 what is quantised again stays the same. A group of zeros has the
    scale 1. An error is at most half a scale.

    Args:
        weight: [O, I] of finite floats.
        scale_dtype: format of the scales; default that of ``weight``.

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
    codes = torch.round(values / scale.float()[..., None]).clamp(-_LARGEST, _LARGEST)
    return pack(codes.view(rows, columns).to(torch.int32)), scale


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
