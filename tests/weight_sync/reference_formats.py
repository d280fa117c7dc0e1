"""Quantised checkpoints by NumPy alone, from what the formats say, without `slime.models.checkpoint`.

Float8 is e4m3 ("FP8 Formats for Deep Learning", table 1) with a float32 scale of 20 bits for each block.
Integers are those of compressed-tensors' ``pack-quantized``, -8 to 7, lowest bits first, with a scale for
each group of a row. MXFP4 is e2m1 with the smallest power of two for 32 inputs by which none is above 7;
MXFP8 is e4m3 with that by which none is above 448, as SGLang makes it: 2^-127 where largest / 448 is 0.
"""

import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

BLOCK, GROUP = (40, 24), 16
_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
Parts = dict[str, torch.Tensor]

_FRACTIONS, _SUBNORMAL = 8, 2.0**-9
# By code, 0 to 126.
_E4M3 = np.array(
    [
        code * _SUBNORMAL if code < 8 else (1 + code % _FRACTIONS / 8) * 2.0 ** (code // 8 - 7)
        for code in range(127)
    ]
)


def reference_checkpoint(served: Path, weights: Parts, target: Path, dtype: torch.dtype) -> Path:
    """Writes weights in a checkpoint's form, and in ``held.data`` what an engine of a dtype makes of it."""
    shutil.copytree(served, target)
    (target / "model.safetensors").unlink()
    form, stored, held = load_file(served / "model.safetensors"), {}, {}
    for name, tensor in weights.items():
        if f"{name}_scale_inv" in form and form[f"{name}_scale_inv"].dtype == torch.uint8:
            parts, values = _mxfp8(name, tensor)
        elif f"{name}_scale_inv" in form:
            parts, values = _float8(name, tensor)
        elif f"{name}_blocks" in form:
            parts, values = _mxfp4(name, tensor)
        elif f"{name}_packed" in form:
            parts, values = _integers(name, tensor, form[f"{name}_scale"].dtype)
        else:
            parts, values = {name: tensor}, tensor
        stored |= parts
        held[name] = values.to(dtype)
    assert stored.keys() == form.keys()
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    save_file(held, target / "held.data")
    return target


def _float8(name: str, weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    values = weight.float().numpy()
    rows, columns = (-(-size // part) for size, part in zip(values.shape, BLOCK, strict=True))
    scales = np.empty((rows, columns), np.float32)
    codes, back = np.empty(values.shape, np.uint8), np.empty(values.shape, np.float32)
    for row in range(rows):
        for column in range(columns):
            at = np.s_[
                row * BLOCK[0] : (row + 1) * BLOCK[0],
                column * BLOCK[1] : (column + 1) * BLOCK[1],
            ]
            mantissa, exponent = np.frexp(np.abs(values[at]).max() / np.float32(448))
            scale = np.ldexp(np.rint(mantissa * np.float32(2**20)), exponent - 20).astype(np.float32)
            found = _nearest(_E4M3, np.abs(values[at] / scale).astype(np.float64))
            scales[row, column] = scale
            codes[at] = found | np.where(np.signbit(values[at]), 128, 0).astype(np.uint8)
            back[at] = np.copysign(_E4M3[found].astype(np.float32) * scale, values[at])
    numbers = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    return {name: numbers, f"{name}_scale_inv": torch.from_numpy(scales)}, torch.from_numpy(back)


def _mxfp8(name: str, weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    codes, scales, back = map(torch.from_numpy, mxfp8(weight.float().numpy()))
    return {name: codes.view(torch.float8_e4m3fn), f"{name}_scale_inv": scales}, back


def mxfp8(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [O, I], bytes of scales [O, I / 32], and the float32 [O, I] that both stand for."""
    groups = values.astype(np.float64).reshape(values.shape[0], -1, 32)
    quotient = np.abs(groups).max(2).astype(np.float32) / np.float32(448)
    mantissa, exponents = np.frexp(quotient)
    exponents = np.where(quotient == 0, -127, np.maximum(exponents - (mantissa == 0.5), -126))
    scale = 2.0 ** exponents[..., None]
    found = _nearest(_E4M3, np.abs(groups) / scale)
    back = np.copysign(_E4M3[found] * scale, groups).astype(np.float32)
    codes = found | np.where(np.signbit(groups), 128, 0).astype(np.uint8)
    return codes.reshape(values.shape), (exponents + 127).astype(np.uint8), back.reshape(values.shape)


def _nearest(numbers: np.ndarray, magnitudes: np.ndarray) -> np.ndarray:
    """Codes of the nearest numbers, of two the even one."""
    middles = (numbers[1:] + numbers[:-1]) / 2
    below = np.searchsorted(middles, magnitudes, side="left")
    last = len(middles) - 1
    in_the_middle = (below <= last) & (middles[np.minimum(below, last)] == magnitudes)
    return (below + (in_the_middle & (below % 2 == 1))).astype(np.uint8)


def _mxfp4(name: str, weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    values = weight.double().numpy().swapaxes(1, 2)  # inputs last
    groups = values.reshape(*values.shape[:2], -1, 32)
    exponents = np.ceil(np.log2(np.abs(groups).max(3) / 7)).astype(np.int64)
    scaled = groups / 2.0 ** exponents[..., None]
    found = _nearest(_E2M1, np.abs(scaled))
    back = np.copysign(_E2M1[found], scaled) * 2.0 ** exponents[..., None]
    codes = found | np.where(np.signbit(scaled), 8, 0).astype(np.uint8)
    blocks = codes[..., 0::2] + 16 * codes[..., 1::2]
    parts = {f"{name}_blocks": blocks.astype(np.uint8), f"{name}_scales": (exponents + 127).astype(np.uint8)}
    held = torch.from_numpy(back.reshape(values.shape).astype(np.float32)).transpose(1, 2)
    return {key: torch.from_numpy(part).contiguous() for key, part in parts.items()}, held.contiguous()


def _integers(name: str, weight: torch.Tensor, scales_in: torch.dtype) -> tuple[Parts, torch.Tensor]:
    values = weight.float().numpy()
    groups = values.reshape(values.shape[0], -1, GROUP)
    scale = torch.from_numpy(np.abs(groups).max(2) / np.float32(7)).to(scales_in)
    wide = scale.float().numpy()[..., None]
    codes = np.clip(np.rint(groups / wide), -8, 7).astype(np.int64)  # which have no -0
    back = (codes.astype(np.float32) * wide).reshape(values.shape)
    nibbles = (codes.reshape(values.shape[0], -1, 8) + 8) << (4 * np.arange(8))
    words = nibbles.sum(2).astype(np.uint32).view(np.int32)
    parts = {f"{name}_packed": torch.from_numpy(words), f"{name}_scale": scale}
    parts[f"{name}_shape"] = torch.tensor(values.shape)
    return parts, torch.from_numpy(back)
