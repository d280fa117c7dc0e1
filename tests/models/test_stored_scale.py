"""Trained groups keep the scale of the checkpoint as long as it fits them."""

import pytest
import torch

from slime.models.checkpoint import fp8, int4, mxfp4, mxfp8
from slime.models.checkpoint.stored_scale import is_kept


def _int4(weight, stored):
    words, scale = int4.quantize(weight, 32, torch.float32, stored)
    return int4.unpack(words), scale


def _float8(weight, stored):
    codes, scale = fp8.quantize(weight, (1, 32), False, stored)
    return codes.view(torch.uint8), scale


def _mxfp8(weight, stored):
    codes, scale = mxfp8.quantize(weight, stored)
    return codes.view(torch.uint8), scale


def _drawn(kind, draw):
    """Codes that use all of the range, numbers and scales of groups; and what quantises again."""
    scales = torch.ldexp(
        1 + torch.rand(40, 2, generator=draw), torch.randint(-9, -3, (40, 2), generator=draw)
    )
    if kind == "int4":
        codes = torch.randint(-8, 8, (40, 64), dtype=torch.int32, generator=draw)
        codes[:, ::32] = -8
        return codes, int4.dequantize(codes, scales, 32, 0), scales, _int4
    if kind in ("float8", "mxfp8"):
        codes = torch.randint(127, (40, 64), dtype=torch.uint8, generator=draw)
        codes[:, ::32] = 126
        numbers = codes.view(torch.float8_e4m3fn)
        if kind == "mxfp8":
            exponents = torch.randint(110, 130, (40, 2), dtype=torch.uint8, generator=draw)
            return codes, mxfp8.dequantize(numbers, exponents), exponents, _mxfp8
        return codes, fp8.dequantize(numbers, scales, (1, 32), (0, 40), (0, 64)), scales, _float8
    blocks = torch.randint(256, (40, 2, 16), dtype=torch.uint8, generator=draw)
    blocks[..., 0] = 0x77
    exponents = torch.randint(110, 130, (40, 2), dtype=torch.uint8, generator=draw)
    return blocks, mxfp4.dequantize(blocks, exponents), exponents, mxfp4.quantize


KINDS = ("int4", "float8", "mxfp4", "mxfp8")
QUANTIZE = {"int4": _int4, "float8": _float8, "mxfp4": mxfp4.quantize, "mxfp8": _mxfp8}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_that_moves_no_number_to_the_next_code_moves_nothing(kind, dtype):
    draw = torch.Generator().manual_seed(2)
    codes, weight, scales, quantize = _drawn(kind, draw)
    step = 1 + 0.01 * torch.rand(weight.shape, generator=draw)
    found, kept = quantize((weight * step).to(dtype), scales)
    assert torch.equal(kept, scales)
    assert torch.equal(found, codes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", [1.5, 0.45])
def test_what_grows_beyond_its_scale_or_needs_less_than_half_of_it_gets_one_of_its_own(kind, factor):
    _, weight, scales, quantize = _drawn(kind, torch.Generator().manual_seed(3))
    weight *= factor
    found, own = quantize(weight, scales), quantize(weight, None)
    assert all(torch.equal(*pair) for pair in zip(found, own, strict=True))
    assert (own[1] != scales).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_zeros_that_is_trained_is_not_held_at_zero(kind):
    """A group of zeros may have any scale, 0 among them."""
    quantize, of_zeros = QUANTIZE[kind], torch.tensor([[1.0], [0]])
    if kind.startswith("mx"):
        of_zeros = torch.tensor([[127], [140]], dtype=torch.uint8)
    zeros, kept = quantize(torch.zeros(2, 32), of_zeros)
    assert torch.equal(kept, of_zeros)
    trained, scales = quantize(torch.full((2, 32), 1e-3), of_zeros)
    assert (scales != of_zeros).all() and (trained != zeros).all()


def test_the_ends_of_the_range_are_those_of_the_codes():
    """Up to half a scale beyond 7 and -8, and what a scale rounded to bfloat16 is off."""
    scale = torch.ones(1, 1)
    for edge, code in ((7.5, 7), (-8.5, -8)):
        for at, kept in ((edge, True), (edge * 1.003, True), (edge * 1.005, False)):
            codes, found = _int4(torch.tensor([[at] + [0.3] * 31]), scale)
            assert torch.equal(found, scale) == kept
            assert not kept or codes[0, 0] == code


def test_a_scale_is_kept_until_numbers_move_and_then_while_more_than_half_of_it_is_used():
    table = {  # reach, whether a number moved, the scale
        (0.5, True, 1.0): False,
        (0.501, True, 1.0): True,
        (1.0, True, 1.0): True,
        (1.001, True, 1.0): False,
        (1.001, False, 1.0): False,
        (0.1, False, 1.0): True,
        (0.0, False, 0.0): True,
        (1.0, True, 0.0): False,
    }
    found = {case: bool(is_kept(*map(torch.tensor, case))) for case in table}
    assert found == table
