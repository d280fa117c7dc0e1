"""Float8 and 4-bit integers against references in float64 that share no code with them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.models.checkpoint import fp8, int4

# Every finite value of e4m3 ("FP8 Formats for Deep Learning", table 1): 4 bits of exponent, 3 of fraction.
E4M3 = sorted(
    {0.0}
    | {fraction / 8 * 2.0**-6 for fraction in range(8)}
    | {
        (1 + fraction / 8) * 2.0 ** (exponent - 7)
        for exponent in range(1, 16)
        for fraction in range(8)
        if (exponent, fraction) != (15, 7)
    }
)


@st.composite
def matrices(draw, columns=st.integers(1, 40)):
    """Draws matrices of blocks whose sizes differ by orders of magnitude, some of them zero."""
    rows, width = draw(st.integers(1, 40)), draw(columns)
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = random.standard_normal((rows, width)) * 10.0 ** random.integers(-30, 20, (rows, 1))
    values[random.random((rows, width)) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = 0
    return torch.tensor(values, dtype=torch.float32)


def blocks_of(matrix, block):
    for row in range(0, matrix.shape[0], block[0]):
        for column in range(0, matrix.shape[1], block[1]):
            yield (
                (row // block[0], column // block[1]),
                np.s_[row : row + block[0], column : column + block[1]],
            )


@settings(max_examples=30, deadline=None)
@given(matrices(), st.integers(1, 16), st.integers(1, 16), st.booleans())
def test_float8_is_as_near_as_its_scale_allows(weight, rows, columns, power_of_two):
    codes, scale = fp8.quantize(weight, (rows, columns), power_of_two)
    assert scale.shape == (math.ceil(weight.shape[0] / rows), math.ceil(weight.shape[1] / columns))
    exact, found = weight.double().numpy(), codes.double().numpy()
    for place, at in blocks_of(weight, (rows, columns)):
        own, largest = float(scale[place]), np.abs(exact[at]).max()
        if largest == 0:
            assert own == 1 and not found[at].any()
            continue
        wanted = largest / E4M3[-1]
        least = wanted * (E4M3[-1] / 464 if power_of_two else 1)
        assert least * (1 - 1e-6) <= own < max(wanted, 2.0**-100) * (2 if power_of_two else 1 + 1e-6)
        assert not power_of_two or math.frexp(own)[0] == 0.5
        scaled = np.minimum(np.abs(exact[at]) / own, E4M3[-1])
        nearest = np.abs(scaled[..., None] - np.array(E4M3)).min(-1)
        assert (np.abs(scaled - np.abs(found[at])) <= nearest + 1e-6 * scaled).all()
        assert (np.sign(found[at]) * np.sign(exact[at]) >= 0).all()


@settings(max_examples=30, deadline=None)
@given(matrices(), st.integers(1, 16), st.integers(1, 16), st.booleans())
def test_float8_again_is_the_same_to_the_last_bit(weight, rows, columns, power_of_two):
    codes, scale = fp8.quantize(weight, (rows, columns), power_of_two)
    back = fp8.dequantize(codes, scale, (rows, columns), (0, weight.shape[0]), (0, weight.shape[1]))
    again, its_scale = fp8.quantize(back, (rows, columns), power_of_two)
    assert torch.equal(its_scale, scale)
    assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))


@settings(max_examples=25, deadline=None)
@given(matrices(), st.integers(1, 16), st.integers(1, 16), st.data())
def test_a_part_of_a_float8_matrix_is_that_of_the_whole(weight, rows, columns, data):
    codes, scale = fp8.quantize(weight, (rows, columns), False)
    spans = []
    for size in weight.shape:
        start = data.draw(st.integers(0, size - 1))
        spans.append((start, data.draw(st.integers(start + 1, size))))
    whole = np.repeat(np.repeat(scale.double().numpy(), rows, 0), columns, 1)
    at = np.s_[spans[0][0] : spans[0][1], spans[1][0] : spans[1][1]]
    expected = codes.double().numpy()[at] * whole[at]
    touched = [
        (start // size, -(-stop // size)) for (start, stop), size in zip(spans, (rows, columns), strict=True)
    ]
    part = scale[touched[0][0] : touched[0][1], touched[1][0] : touched[1][1]]
    found = fp8.dequantize(codes[at], part, (rows, columns), *spans)
    assert np.array_equal(found.numpy(), expected.astype(np.float32))


GROUPS = st.integers(1, 5).map(lambda count: 8 * count)


@settings(max_examples=30, deadline=None)
@given(matrices(columns=GROUPS), st.sampled_from([torch.float32, torch.bfloat16]))
def test_integers_are_within_half_a_scale_and_stay_the_same(weight, dtype):
    weight = (weight.clamp(-1e30, 1e30)).to(dtype)
    words, scale = int4.quantize(weight, 8)
    assert (words.dtype, scale.dtype) == (torch.int32, dtype)
    assert words.shape == scale.shape == (weight.shape[0], weight.shape[1] // 8)
    codes = int4.unpack(words)
    nibbles = (words.long()[..., None].numpy() >> (4 * np.arange(8))) & 15
    assert np.array_equal(codes.numpy(), nibbles.reshape(codes.shape) - 8)
    assert torch.equal(int4.pack(codes), words)
    exact = codes.double().numpy() * np.repeat(scale.double().numpy(), 8, 1)
    error = np.abs(exact - weight.double().numpy())
    # Scales in bfloat16 are off by 2^-9, so the largest numbers may be off by 7 times that.
    slack = 0.5 + (7 * 2.0**-8 if dtype == torch.bfloat16 else 1e-5)
    assert (error <= np.repeat(scale.double().numpy(), 8, 1) * slack).all()
    back = int4.dequantize(codes, scale, 8, 0)
    assert np.array_equal(back.numpy(), exact.astype(np.float32))
    again, its_scale = int4.quantize(back, 8)
    assert torch.equal(again, words)
    assert torch.equal(its_scale, scale.float())


def test_groups_of_zeros_have_a_scale():
    words, scale = int4.quantize(torch.zeros(2, 16), 8)
    assert torch.equal(scale, torch.ones(2, 2))
    assert torch.equal(int4.unpack(words), torch.zeros(2, 16, dtype=torch.int32))


def test_a_group_too_small_for_the_format_of_its_scale_becomes_zero():
    weight = torch.full((1, 8), 1e-9)
    words, scale = int4.quantize(weight, 8, torch.float16)
    assert scale.item() > 0
    assert torch.equal(int4.dequantize(int4.unpack(words), scale, 8, 0), torch.zeros(1, 8))


def test_part_of_a_row_of_integers():
    codes = torch.randint(-8, 8, (3, 32), dtype=torch.int32)
    scale = torch.rand(3, 4)
    whole = codes.double() * scale.double().repeat_interleave(8, 1)
    part = int4.dequantize(codes[:, 11:30], scale[:, 1:4], 8, 11)
    assert torch.equal(part.double(), whole[:, 11:30].float().double())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(bad):
    weight = torch.ones(8, 8)
    weight[3, 3] = bad
    with pytest.raises(ValueError, match="numbers that are not finite"):
        fp8.quantize(weight, (4, 4), False)
    with pytest.raises(ValueError, match="numbers that are not finite"):
        int4.quantize(weight, 8)


def test_numbers_too_small_for_a_scale_of_their_own_are_within_that_of_the_smallest():
    for value in (1e-33, 1e-38, 1e-45):
        for power_of_two in (False, True):
            weight = torch.full((4, 6), value)
            codes, scale = fp8.quantize(weight, (4, 6), power_of_two)
            assert scale.item() == 2.0**-100
            assert (codes.double() * scale.double() - weight.double()).abs().max() <= 2.0**-110


@pytest.mark.parametrize("columns", range(1, 17))
def test_rows_that_are_no_multiple_of_a_word_are_packed_into_one_more(columns):
    codes = torch.randint(-8, 8, (3, columns), dtype=torch.int32)
    words = int4.pack(codes)
    assert words.shape == (3, math.ceil(columns / 8))
    assert torch.equal(int4.unpack(words)[:, :columns], codes)
