"""Rotary position embedding tables."""

import torch

from slime.models.rope import Rope, inverse_frequencies


def rotation_tables(
    rope: Rope, head_dim: int, positions: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(cos, sin)``, each ``[positions, head_dim]``, for ``x * cos + roll(x, head_dim / 2) * sin``.

    On the host. The sign of the rotated first half lives in ``sin``, which saves a negation per layer.
    """
    angles = torch.outer(torch.arange(positions).float(), inverse_frequencies(rope, head_dim))
    cos, sin = angles.cos() * rope.magnitude, angles.sin() * rope.magnitude
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)
