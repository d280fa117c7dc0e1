"""Numbers of 4 bits (e2m1) with a power of two (e8m0) for each 32 neighbours: MXFP4.

"OCP Microscaling Formats (MX) Specification" 1.0, sections 5.3.3 and 5.4.1, as gpt-oss stores its experts:
two numbers to a byte, the first one in the low bits.
"""

from itertools import pairwise

import torch

from slime.models.checkpoint.quantization import MX_GROUP as GROUP
from slime.models.checkpoint.stored_scale import is_kept

BYTES = GROUP // 2
"""The bytes of a group's numbers."""
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))
# From where on a magnitude is rounded up to the next of them; to even at the middle.
_MIDDLES = tuple((low + high) / 2 for low, high in pairwise(_POSITIVE))
_DOWN_AT_MIDDLE = tuple(number % 2 == 0 for number in range(len(_MIDDLES)))
_ROUNDED_TO_LARGEST = 7.0
_BIAS = 127
# 4 with the largest scale that such a magnitude gets would be no float32.
_TOO_LARGE = 3.5 * 2.0**126


def quantize(weight: torch.Tensor, stored: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes uint8 [O, I / 32, 16] and scales uint8 [O, I / 32], which are exponents of 2 plus 127.

    A scale is the smallest at which the largest number of a group is not cut off by more than rounding, so
    that what is quantised again stays the same. A group of zeros has the scale 1.

    Args:
        weight: [O, I] of finite floats.
        stored: scales of a checkpoint, which groups keep (`is_kept`).

    Raises:
        ValueError: a number is not finite, or so large that it would not be; or I is no multiple of 32.
    """
    rows, columns = weight.shape
    if columns % GROUP:
        raise ValueError(f"has {columns} columns, no multiple of a group of {GROUP}")
    values = weight.float().reshape(rows, columns // GROUP, GROUP)
    largest = values.abs().amax(dim=2)
    if not bool((largest < _TOO_LARGE).all()):
        raise ValueError("has numbers that are not finite, or too large for this format")
    mantissa, exponent = torch.frexp(largest)
    exponent = exponent - 2 - (mantissa <= _ROUNDED_TO_LARGEST / 8).int()
    exponent = torch.where(largest == 0, 0, exponent.clamp(min=-_BIAS))
    if stored is not None:
        own = stored.int() - _BIAS
        exponent = torch.where(_kept(values, own, weight.dtype), own, exponent)
    codes = _rounded(torch.ldexp(values, -exponent[..., None]))
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponent + _BIAS).to(torch.uint8)


def _kept(values: torch.Tensor, exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The groups [O, I / 32] whose numbers [O, I / 32, 32] keep their scale."""
    scaled = torch.ldexp(values, -exponent[..., None])
    numbers = torch.tensor(_VALUES, device=values.device)[_rounded(scaled).int()]
    moved = (torch.ldexp(numbers, exponent[..., None]).to(dtype) != values.to(dtype)).any(dim=2)
    return is_kept(scaled.abs().amax(dim=2) / _ROUNDED_TO_LARGEST, moved, torch.ones_like(exponent))


def _rounded(values: torch.Tensor) -> torch.Tensor:
    """The codes uint8 of the nearest numbers; those above 6 are cut off."""
    middles = torch.tensor(_MIDDLES, device=values.device)
    below = torch.nextafter(middles, torch.zeros_like(middles))
    bounds = torch.where(torch.tensor(_DOWN_AT_MIDDLE, device=values.device), middles, below)
    magnitudes = torch.bucketize(values.abs().contiguous(), bounds, out_int32=True).to(torch.uint8)
    return magnitudes | torch.signbit(values).to(torch.uint8) << 3


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Float32 [..., 32 x groups] of bytes [..., groups, 16] and scales [..., groups], both uint8.

    Raises:
        ValueError: a number is not finite: its scale is 255, which is none, or the product too large.
    """
    pairs = torch.tensor([(_VALUES[byte & 15], _VALUES[byte >> 4]) for byte in range(256)])
    numbers = pairs.to(blocks.device).index_select(0, blocks.reshape(-1).int())
    # 2^-127 is a number of float32 as well, a subnormal one.
    factors = scales.view(torch.float8_e8m0fnu).float()
    values = numbers.view(*scales.shape, GROUP).mul_(factors[..., None])
    high = scales > _BIAS + 125  # below, 6 x the scale is finite
    if bool(high.any()) and not bool(torch.isfinite(values[high]).all()):
        raise ValueError(f"has numbers that are not finite (scale {int(scales.max())})")
    return values.flatten(-2)
