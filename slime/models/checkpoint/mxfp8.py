"""Matrices of float8 (e4m3) with a power of two (e8m0) for each 32 neighbours of a row: MXFP8.

"OCP Microscaling Formats (MX) Specification" 1.0, sections 5.3.1 and 5.4.1. Its way to a scale (6.3) may cut
off the largest numbers of a group. SGLang's quantiser has another one, which is used here too: largest / 448
is rounded up to a power of two, and nothing is cut off.
"""

import torch

from slime.models.checkpoint import fp8
from slime.models.checkpoint.quantization import MX_GROUP as GROUP

BLOCK = (1, GROUP)
_MANTISSA_BITS, _BELOW_NEXT_POWER = 23, 0x007FFFFF
# Up to which 2^120 x the nearest e4m3 is a float32: 256 would be the first that is not.
_TOO_LARGE = 248.0 * 2.0**120


def quantize(weight: torch.Tensor, stored: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Float8 [O, I] and scales uint8 [O, I / 32], which are exponents of 2 plus 127; 0 for a group of zeros.

    Args:
        weight: [O, I] of finite floats.
        stored: scales of a checkpoint, which groups keep (`stored_scale.is_kept`).

    Raises:
        ValueError: a number is not finite, or so large that it would not be; or I is no multiple of 32.
    """
    require_groups(weight.shape[1])
    kept = None if stored is None else _factors(stored)
    codes, scales = fp8.quantize_by(_scales, weight, BLOCK, kept)
    return codes, scales.to(torch.float8_e8m0fnu).view(torch.uint8)


def _scales(largest: torch.Tensor) -> torch.Tensor:
    if not bool((largest < _TOO_LARGE).all()):
        raise ValueError("has numbers that are too large for this format")
    above = (largest / fp8.LARGEST).view(torch.int32) + _BELOW_NEXT_POWER
    return _factors((above >> _MANTISSA_BITS).to(torch.uint8))


def _factors(scales: torch.Tensor) -> torch.Tensor:
    return scales.view(torch.float8_e8m0fnu).float()


def dequantize(codes: torch.Tensor, scales: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Float32 of float8 codes in the columns from ``first``, and the scales of the groups that these touch.

    Raises:
        ValueError: a number is not finite: its code or its scale is NaN, or the product too large.
    """
    rows, columns = codes.shape
    values = fp8.dequantize(codes, _factors(scales), BLOCK, (0, rows), (first, first + columns))
    if not bool(torch.isfinite(values).all()):
        raise ValueError("has numbers that are not finite")
    return values


def require_groups(columns: int) -> None:
    """Raises ValueError if rows are not made up of whole groups, which SGLang's kernels do not take."""
    if columns % GROUP:
        raise ValueError(f"has {columns} columns, no multiple of a group of {GROUP}")
