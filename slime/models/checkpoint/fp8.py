"""Matrices of float8 (e4m3, "FP8 Formats for Deep Learning", table 1) with one float32 scale for each block.

weight = float8 x scale. Blocks at the right and lower edge are smaller where the sizes are no multiples.
"""

import math
from collections.abc import Callable

import torch

from slime.models.checkpoint.stored_scale import divisor, is_kept

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
_ROUNDED_TO_LARGEST = 464.0
# With so many bits of a scale 448 x scale is exact in float32, so that quantising again gives the same scale.
_SCALE_BITS = 20
_SMALLEST_SCALE = 2.0**-100


def scale_shape(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    return math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1])


def quantize(
    weight: torch.Tensor,
    block: tuple[int, int],
    power_of_two: bool,
    stored: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float8 [O, I] and float32 scales [O / rows, I / columns], these quotients rounded up.

    A block of zeros has the scale 1. An error is at most 2^-4 of the value, or 2^-10 of the scale if that is
    more.

    Args:
        weight: [O, I] of finite floats.
        block: rows and columns that share a scale.
        power_of_two: scales are powers of two (``ue8m0``), rounded up.
        stored: scales of a checkpoint, float32, which blocks keep (`is_kept`).

    Raises:
        ValueError: a number is not finite.
    """

    def scale_of(largest: torch.Tensor) -> torch.Tensor:
        scale = _power_of_two(largest) if power_of_two else _short(largest / LARGEST)
        return torch.where(largest == 0, torch.ones_like(scale), scale.clamp(min=_SMALLEST_SCALE))

    return quantize_by(scale_of, weight, block, stored)


def quantize_by(
    scale_of: Callable[[torch.Tensor], torch.Tensor],
    weight: torch.Tensor,
    block: tuple[int, int],
    stored: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises like `quantize`, with scales that ``scale_of`` makes of each block's largest magnitude."""
    values = weight.float()
    largest = _largest(values, block)
    if not bool(torch.isfinite(largest).all()):
        raise ValueError("has numbers that are not finite")
    scale = scale_of(largest)
    if stored is not None:
        scale = torch.where(_kept(values, largest, stored, block, weight.dtype), stored, scale)
    return _rounded(values, scale, block), scale


def _rounded(values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    scaled = values / _spread(divisor(scale), block, (0, values.shape[0]), (0, values.shape[1]))
    return scaled.clamp(-LARGEST, LARGEST).to(FLOAT8)


def _kept(
    values: torch.Tensor,
    largest: torch.Tensor,
    stored: torch.Tensor,
    block: tuple[int, int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The blocks that keep their scale; ``largest`` is the largest magnitude of each."""
    rows, columns = (0, values.shape[0]), (0, values.shape[1])
    back = dequantize(_rounded(values, stored, block), stored, block, rows, columns).to(dtype)
    moved = _largest((back != values.to(dtype)).float(), block) > 0
    return is_kept(largest / divisor(stored).abs() / _ROUNDED_TO_LARGEST, moved, stored)


def dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int],
    rows: tuple[int, int],
    columns: tuple[int, int],
) -> torch.Tensor:
    """Float32 of the rows and columns ``codes`` of a matrix.

    Args:
        codes: float8, those rows and columns.
        scale: of the blocks that they touch.
        block: rows and columns that share a scale.
        rows, columns: from, and up to which they go in the matrix.
    """
    return codes.float() * _spread(scale.float(), block, rows, columns)


def _largest(values: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest magnitude of each block; NaN where there is one."""
    rows, columns = scale_shape((values.shape[0], values.shape[1]), block)
    right, lower = columns * block[1] - values.shape[1], rows * block[0] - values.shape[0]
    if right or lower:
        values = torch.nn.functional.pad(values, (0, right, 0, lower))
    return values.abs().view(rows, block[0], columns, block[1]).amax(dim=(1, 3))


def _short(scale: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(torch.round(mantissa * 2.0**_SCALE_BITS), exponent - _SCALE_BITS)


def _power_of_two(largest: torch.Tensor) -> torch.Tensor:
    """The smallest at which the largest number of a block is not cut off by more than rounding."""
    # What is divided to 0 would have the exponent 0.
    mantissa, exponent = torch.frexp((largest / _ROUNDED_TO_LARGEST).clamp(min=_SMALLEST_SCALE))
    return torch.ldexp(torch.ones_like(largest), torch.where(mantissa == 0.5, exponent - 1, exponent))


def _spread(
    scale: torch.Tensor, block: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int]
) -> torch.Tensor:
    """The scale of each number in these rows and columns."""
    for dim, (size, (start, stop)) in enumerate(zip(block, (rows, columns), strict=True)):
        at = torch.arange(start, stop, device=scale.device) // size - start // size
        scale = scale.index_select(dim, at)
    return scale
