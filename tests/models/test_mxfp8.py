"""Matrices in MXFP8: made as NumPy makes them by the format's own words, read back, refused by name."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from slime.models.checkpoint import encoding, mxfp8
from slime.models.checkpoint.encoding import Mxfp8Encoding
from slime.models.checkpoint.quantization import Quantization, read_quantization
from slime.models.checkpoint.stored_format import StoredFormat
from slime.models.checkpoint.weights_dir import WeightsReader
from slime.models.hf_config import HfConfig
from tests.weight_sync.reference_formats import mxfp8 as reference

CONFIG = {"quantization_config": {"quant_method": "mxfp8", "weight_block_size": [1, 32]}}
NAME = "model.layers.0.mlp.experts.1.down_proj.weight"
SCALES = f"{NAME}_scale_inv"
# By code: 4 bits of exponent (bias 7), 3 of mantissa; 0x7F is NaN.
E4M3 = [
    code / 8 * 2.0**-6 if code < 8 else (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7) for code in range(127)
]
MIDDLES = [(low + high) / 2 for low, high in pairwise(E4M3)]


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def stored(rows=6, groups=3):
    """Any codes and scales that are numbers."""
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(256, (rows, 32 * groups), dtype=torch.uint8, generator=draw)
    codes[codes & 127 == 127] = 0
    scales = torch.randint(100, 140, (rows, groups), dtype=torch.uint8, generator=draw)
    return {NAME: codes.view(torch.float8_e4m3fn), SCALES: scales}


def checkpoint(path, tensors, config=CONFIG):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def exact(tensors):
    """In float64, code by code."""
    values = [
        (-1.0) ** (code >> 7) * E4M3[code & 127]
        for code in tensors[NAME].view(torch.uint8).flatten().tolist()
    ]
    factors = 2.0 ** (tensors[SCALES].double() - 127)
    return torch.tensor(values).double().view(tensors[NAME].shape) * factors.repeat_interleave(32, 1)


def test_the_way_is_read_off_config_json():
    assert read_quantization(HfConfig(CONFIG)) == Quantization("mxfp8", group=32, power_of_two=True)
    short = HfConfig({"quantization_config": {"quant_method": "mxfp8"}})
    assert read_quantization(short) == read_quantization(HfConfig(CONFIG))


GROUP = st.lists(
    st.one_of(st.floats(-448, 448, width=32), st.sampled_from([*MIDDLES, *E4M3, -0.0, -MIDDLES[0]])),
    min_size=32,
    max_size=32,
)


@settings(max_examples=60, deadline=None)
@example([1.0] + [0.0] * 31, -149, torch.float32)  # of which 1 / 448 is no float32 but 0
@example([0.0] * 32, 0, torch.bfloat16)
@given(GROUP, st.integers(-150, 118), st.sampled_from([torch.float32, torch.bfloat16]))
def test_numbers_and_scales_are_those_of_the_reference(values, exponent, dtype):
    """Ties, zeros of both signs, numbers below the smallest, and groups that float32 holds as subnormals."""
    weight = torch.ldexp(torch.tensor([values]), torch.tensor(exponent)).to(dtype)
    codes, scales = mxfp8.quantize(weight)
    wanted = reference(weight.float().numpy())
    assert torch.equal(bits(codes), torch.from_numpy(wanted[0]))
    assert torch.equal(scales, torch.from_numpy(wanted[1]))
    found = mxfp8.dequantize(codes, scales)
    assert torch.equal(bits(found), bits(torch.from_numpy(wanted[2])))
    again = mxfp8.quantize(found, scales)
    assert torch.equal(bits(again[0]), bits(codes)) and torch.equal(again[1], scales)


@pytest.mark.parametrize(
    ("largest", "scale"),
    [
        (448.0, 127),
        (np.nextafter(np.float32(448), np.float32(500)), 128),
        (224.0, 126),
        (225.0, 127),
        (0.0, 0),
    ],
)
def test_a_scale_is_the_smallest_that_cuts_nothing_off(largest, scale):
    """SGLang's rule; by that of the specification, section 6.3, 449 to 511 would become 448."""
    weight = torch.zeros(1, 64)
    weight[0, 5] = float(largest)
    codes, scales = mxfp8.quantize(weight)
    assert scales.tolist() == [[scale, 0]]
    assert mxfp8.dequantize(codes, scales)[0, 5] == pytest.approx(float(largest), rel=2**-4)


@pytest.mark.parametrize("scale", [0, 1, 126, 127, 128, 246, 247, 254])
def test_every_code_with_odd_scales(scale, tmp_path):
    """The largest scales have numbers that float32 cannot hold, which are left out here."""
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    tensors = {NAME: codes.view(torch.float8_e4m3fn), SCALES: torch.full((8, 1), scale, dtype=torch.uint8)}
    too_large = ((codes & 127).int() + 8 * (scale - 127)) >= 8 * 135
    assert bool(too_large[:, :-1].any()) == (scale > 246)
    codes[too_large | (codes & 127 == 127)] = 0
    with WeightsReader(checkpoint(tmp_path, tensors)) as reader:
        assert torch.equal(bits(reader.read(NAME)), bits(exact(tensors).float()))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_part_is_read_by_itself(tmp_path_factory, data):
    tensors = stored()
    path = tmp_path_factory.getbasetemp() / "mxfp8-parts"
    with WeightsReader(checkpoint(path, tensors)) as reader:
        box = []
        for size in (6, 96):
            start = data.draw(st.integers(0, size))
            box.append(slice(start, data.draw(st.integers(start, size))))
        assert torch.equal(reader.read_part(NAME, box), exact(tensors).float()[tuple(box)])


@pytest.mark.parametrize(("part", "byte"), [(NAME, 0x7F), (NAME, 0xFF), (SCALES, 0xFF), (SCALES, 0xFE)])
def test_numbers_that_are_none_are_refused_with_tensor_and_file(part, byte, tmp_path):
    tensors = stored()
    tensors[NAME][1, 33] = 448.0
    tensors[part].view(torch.uint8)[1, 1 if part == SCALES else 33] = byte
    path = checkpoint(tmp_path, tensors)
    with WeightsReader(path) as reader:
        reader.read_part(NAME, [slice(0, 1)])
        with pytest.raises(ValueError, match=f"model.safetensors: {NAME} has numbers that are not finite"):
            reader.read(NAME)
    with pytest.raises(ValueError, match=f"weight '{NAME}': has numbers that are not finite"):
        list(StoredFormat(path).decode(tensors.items()))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 248 * 2.0**120])
def test_numbers_that_cannot_be_stored_are_named(number, tmp_path):
    weight = torch.zeros(6, 96)
    weight[1, 3] = number
    served = StoredFormat(checkpoint(tmp_path, stored()))
    with pytest.raises(ValueError, match=f"{NAME}: has numbers that are (not finite|too large)"):
        served.encode([(NAME, weight)])
    weight[1, 3] = 247 * 2.0**120
    assert all(torch.isfinite(tensor).all() for _, tensor in served.decode(served.encode([(NAME, weight)])))


def test_groups_that_are_not_whole_are_refused(tmp_path):
    """SGLang pads no row either."""
    with pytest.raises(ValueError, match="has 48 columns, no multiple of a group of 32"):
        mxfp8.quantize(torch.zeros(2, 48))
    tensors = {NAME: torch.zeros(2, 48).to(torch.float8_e4m3fn), SCALES: torch.zeros(2, 2, dtype=torch.uint8)}
    with pytest.raises(ValueError, match=f"{NAME}: has 48 columns, no multiple of a group of 32"):
        WeightsReader(checkpoint(tmp_path, tensors))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({SCALES: None}, f"{NAME} is quantised and has no {SCALES}"),
        ({SCALES: None, f"{NAME}_scale": torch.ones(6, 3)}, f"{NAME} is quantised and has no {SCALES}"),
        ({SCALES: torch.ones(6, 3)}, f"{SCALES} is torch.float32, wanted torch.uint8"),
        (
            {SCALES: torch.ones(6, 3).to(torch.float8_e8m0fnu)},
            f"{SCALES} is torch.float8_e8m0fnu, wanted torch.uint8",
        ),
        (
            {SCALES: torch.zeros(6, 2, dtype=torch.uint8)},
            rf"{SCALES} is \[6, 2\], wanted \[6, 3\] for {NAME}",
        ),
        ({NAME: torch.zeros(6, 96).to(torch.float8_e5m2)}, f"{NAME} is torch.float8_e5m2, wanted torch"),
        ({NAME: torch.zeros(2, 3, 96).to(torch.float8_e4m3fn)}, rf"{NAME} is quantised and \[2, 3, 96\]"),
        ({"a.gate_up_proj": torch.zeros(2, 3, 96).to(torch.float8_e4m3fn)}, "a.gate_up_proj is torch.float8"),
    ],
)
def test_what_does_not_go_together_is_named(tmp_path, change, said):
    tensors = {name: tensor for name, tensor in (stored() | change).items() if tensor is not None}
    with pytest.raises(ValueError, match=f"^{tmp_path}.*: {said}"):
        WeightsReader(checkpoint(tmp_path, tensors))


def test_groups_that_nothing_has_trained_keep_what_no_rule_would_choose():
    """Groups whose numbers a smaller scale would hold, or that are zeros of both signs."""
    tensors = stored(10, 3)
    tensors[NAME].view(torch.uint8)[:5] &= 0xBF
    tensors[NAME].view(torch.uint8)[5, :32] &= 0x80
    made = Mxfp8Encoding(NAME, (10, 96))
    weight = made.decode(tensors)
    assert not torch.equal(made.encode(weight)[SCALES], tensors[SCALES])
    for dtype in (torch.float32, torch.bfloat16):
        again = made.encode(weight.to(dtype), tensors[SCALES])
        assert all(torch.equal(bits(part), bits(tensors[name])) for name, part in again.items())


def test_strips_change_nothing(monkeypatch):
    weight, made = torch.randn(10, 96), Mxfp8Encoding(NAME, (10, 96))
    whole = made.encode(weight)
    monkeypatch.setattr(encoding, "_STRIP_BYTES", 4 * 96 * 3)
    assert all(torch.equal(bits(part), bits(whole[name])) for name, part in made.encode(weight).items())
    assert {name: (part.dtype, part.shape) for name, part in whole.items()} == made.specs()
