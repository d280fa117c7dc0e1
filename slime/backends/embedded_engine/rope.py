"""Rotary position embedding tables."""

import math

import torch

from slime.models.shape import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """``[head_dim / 2]`` float32 rotation per position of each pair of features.

    Llama-3 scaling (Llama 3.1 reference code): wavelengths above ``original_max / low_freq_factor``
    are stretched by ``factor``, those below ``original_max / high_freq_factor`` stay, and between
    the two they are interpolated.
    """
    frequencies = 1.0 / rope.base ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.llama3 is None:
        return frequencies
    factor, low, high = (rope.llama3[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = rope.llama3["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequencies
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelength > original / low, frequencies / factor, blended)
    return torch.where(wavelength < original / high, frequencies, scaled)


def rotation_tables(
    rope: Rope, head_dim: int, positions: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(cos, sin)``, each ``[positions, head_dim]``, for ``x * cos + roll(x, head_dim / 2) * sin``.

    The sign of the rotated first half lives in ``sin``, which saves a negation per layer.
    """
    angles = torch.outer(torch.arange(positions).float(), inverse_frequencies(rope, head_dim))
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)
