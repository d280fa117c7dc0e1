"""What stands in the place of weights in a quantised checkpoint: made, recognised and read back."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from slime.models.checkpoint import encoding, fp8, int4
from slime.models.checkpoint.encoding import Fp8Encoding, Int4Encoding, Mxfp8Encoding
from slime.models.checkpoint.stored_format import StoredFormat
from slime.models.checkpoint.weights_dir import WeightsReader
from tests.families import tiny_family
from tools.convert_hf_to_fp8 import main as to_fp8

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [4, 6]}
CHANNEL = {
    "quant_method": "compressed-tensors",
    "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}
INT4 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8}}},
}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def checkpoint(tmp_path):
    """``checkpoint(config, *encodings)``: a directory with those weights, and one that is not quantised."""

    def write(config, *encodings):
        tensors = {"norm.weight": random(10)}
        for each in encodings:
            tensors |= each.encode(random(*each.shape))
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
        return tmp_path, load_file(tmp_path / "model.safetensors")

    return write


ENCODINGS = {
    "blocks": (
        FP8,
        Fp8Encoding("a.weight", (10, 20), (4, 6), "a.weight_scale_inv", (torch.float32, (3, 4)), False),
    ),
    "ue8m0": (
        FP8 | {"scale_fmt": "ue8m0"},
        Fp8Encoding("a.weight", (10, 20), (4, 6), "a.weight_scale_inv", (torch.float8_e8m0fnu, (3, 4)), True),
    ),
    "one scale": (
        {"quant_method": "fp8"},
        Fp8Encoding("a.weight", (10, 20), (10, 20), "a.weight_scale", (torch.float32, ()), False),
    ),
    "rows": (
        CHANNEL,
        Fp8Encoding("a.weight", (10, 20), (1, 20), "a.weight_scale", (torch.float32, (10, 1)), False),
    ),
    "groups": (INT4, Int4Encoding("a.weight", (10, 32), 8, torch.bfloat16)),
    "mxfp8": ({"quant_method": "mxfp8"}, Mxfp8Encoding("a.weight", (10, 64))),
    "int32": (INT4, Int4Encoding("a.weight", (10, 32), 8, torch.float32, torch.int32)),
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_names_formats_and_shapes_are_those_of_the_checkpoint(checkpoint, name):
    config, made = ENCODINGS[name]
    path, stored = checkpoint(config, made)
    weight, norm = random(*made.shape, seed=7), random(10, seed=8)
    found = StoredFormat(path).encode([("a.weight", weight), ("norm.weight", norm)])
    assert [part for part, _ in found] == [*made.specs(), "norm.weight"]
    for part, tensor in found:
        assert (tensor.dtype, tensor.shape) == (stored[part].dtype, stored[part].shape)
    told = StoredFormat(path).encoded("a.weight", (weight.dtype, tuple(weight.shape)))
    told |= StoredFormat(path).encoded("norm.weight", (norm.dtype, (10,)))
    assert told == {part: (tensor.dtype, tuple(tensor.shape)) for part, tensor in found}
    again = StoredFormat(path).encode([("a.weight", _read(path, "a.weight"))])
    if (
        name in ("ue8m0", "mxfp8") or stored[again[1][0]].dtype == torch.float32
    ):  # a rounded scale moves the others
        assert all(torch.equal(_bits(tensor), _bits(stored[part])) for part, tensor in again)


def _bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def _read(path, name):
    with WeightsReader(path) as reader:
        return reader.read(name)


@pytest.mark.parametrize("name", ENCODINGS)
def test_what_was_made_is_read_as_a_file_would_be(checkpoint, name):
    config, made = ENCODINGS[name]
    path, stored = checkpoint(config, made)
    found = dict(StoredFormat(path).decode(reversed(stored.items())))
    assert found.keys() == {"a.weight", "norm.weight"}
    assert torch.equal(found["a.weight"], _read(path, "a.weight"))
    assert (found["a.weight"] - random(*made.shape)).abs().max() < 0.4


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 9), st.integers(0, 2000), st.booleans())
def test_strips_change_nothing(rows, groups, block, strip, power_of_two):
    weight = random(rows, groups * 8, seed=rows)
    scales = torch.float32, fp8.scale_shape((rows, groups * 8), (block, 3))
    encodings = (
        Fp8Encoding("w", (rows, groups * 8), (block, 3), "s", scales, power_of_two),
        Int4Encoding("w", (rows, groups * 8), 8, torch.float32),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "_STRIP_BYTES", strip)
        parts = [each.encode(weight) for each in encodings]
    codes, scale = fp8.quantize(weight, (block, 3), power_of_two)
    assert torch.equal(_bits(parts[0]["w"]), _bits(codes)) and torch.equal(parts[0]["s"], scale)
    words, scale = int4.quantize(weight, 8)
    assert torch.equal(parts[1]["w_packed"], words) and torch.equal(parts[1]["w_scale"], scale)
    assert parts[1]["w_shape"].tolist() == [rows, groups * 8]
    stored = [parts[0]["s"] * 1.3, parts[1]["w_scale"] * 1.3]  # which some keep
    whole = [each.encode(weight, scales) for each, scales in zip(encodings, stored, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "_STRIP_BYTES", strip)
        cut = [each.encode(weight, scales) for each, scales in zip(encodings, stored, strict=True)]
    assert torch.equal(whole[1]["w_scale"], stored[1])
    for one, other in zip(whole, cut, strict=True):
        assert all(torch.equal(_bits(one[name]), _bits(other[name])) for name in one)


def test_a_strip_is_no_larger_than_it_has_to_be(monkeypatch):
    monkeypatch.setattr(encoding, "_STRIP_BYTES", 4 * 8 * 20)
    rows = [at.stop - at.start for _, at in encoding._strips((50, 20), 4)]
    assert rows == [8] * math.ceil(50 / 8)


def test_what_does_not_fit_is_named(checkpoint):
    made = ENCODINGS["blocks"][1]
    stored = StoredFormat(checkpoint(FP8, made)[0])
    with pytest.raises(ValueError, match=r"has no weight 'b.weight', which its engines"):
        stored.encode([("b.weight", torch.zeros(2))])
    with pytest.raises(ValueError, match=r"a.weight is \[10, 20\], and .* given \[20, 10\]"):
        stored.encode([("a.weight", torch.zeros(20, 10))])
    with pytest.raises(ValueError, match=r"norm.weight is \[10\], and .* given \[11\]"):
        stored.encode([("norm.weight", torch.zeros(11))])
    with pytest.raises(ValueError, match=r"a.weight: has numbers that are not finite"):
        stored.encode([("a.weight", torch.full((10, 20), math.nan))])
    codes, scale = made.encode(random(10, 20)).items()
    for tensors, said in (
        ([codes], "'a.weight': comes without a.weight_scale_inv"),
        ([scale], "'a.weight': comes without a.weight$"),
        ([("a.weight", codes[1].float()), scale], r"float32 \[10, 20\] .wanted: float8_e4m3fn \[10, 20\]"),
        ([codes, (scale[0], scale[1].T)], r"float32 \[4, 3\] .wanted: float32 \[3, 4\]"),
    ):
        with pytest.raises(ValueError, match=said):
            list(stored.decode(tensors))


def test_a_plain_weight_is_not_taken_for_a_packed_one(checkpoint):
    made = ENCODINGS["groups"][1]
    stored = StoredFormat(checkpoint(INT4, made)[0])
    with pytest.raises(ValueError, match=r"'a.weight': is stored as a.weight_packed, a.weight_scale"):
        list(stored.decode([("a.weight", torch.zeros(10, 32))]))
    parts = made.encode(random(10, 32)) | {"a.weight_shape": torch.tensor([10, 31])}
    with pytest.raises(ValueError, match=r"a.weight_shape is \[10, 31\] .wanted: \[10, 32\]"):
        list(stored.decode(parts.items()))


EXPERTS = "model.language_model.layers.0.mlp.experts"


@pytest.fixture
def experts_one_by_one(tmp_path):
    """A float8 checkpoint of a family whose model has the experts of a layer in one tensor."""
    parts = {"gate_proj": (10, 20), "up_proj": (10, 20), "down_proj": (20, 10)}
    tensors = {"mtp.norm.weight": random(10)}
    for number in range(12):  # of two digits too
        for part, shape in parts.items():
            name = f"{EXPERTS}.{number}.{part}.weight"
            scale = torch.float32, fp8.scale_shape(shape, (4, 6))
            made = Fp8Encoding(name, shape, (4, 6), f"{name}_scale_inv", scale, False)
            tensors |= made.encode(random(*shape, seed=number + shape[0]))
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"model_type": "qwen3_5_moe", "quantization_config": FP8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_experts_in_one_tensor_are_taken_apart_and_put_together(experts_one_by_one):
    stored = StoredFormat(experts_one_by_one)
    gate_up, down = (_read(experts_one_by_one, f"{EXPERTS}.{part}_proj") for part in ("gate_up", "down"))
    assert gate_up.shape == (12, 20, 20) and down.shape == (12, 20, 10)
    for number in range(12):
        up = _read(experts_one_by_one, f"{EXPERTS}.{number}.up_proj.weight")
        assert torch.equal(gate_up[number, 10:], up)
    found = stored.encode([(f"{EXPERTS}.gate_up_proj", gate_up), (f"{EXPERTS}.down_proj", down)])
    wanted = load_file(experts_one_by_one / "model.safetensors")
    assert len(found) == len(wanted) - 1
    for name, tensor in found:
        assert stored.spec(name) == (tensor.dtype, tuple(tensor.shape))
        assert torch.equal(_bits(tensor), _bits(wanted[name])), name
    again = dict(stored.decode(reversed(found)))
    assert again.keys() == {f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"}
    assert torch.equal(again[f"{EXPERTS}.gate_up_proj"], gate_up)
    assert torch.equal(again[f"{EXPERTS}.down_proj"], down)


def test_other_experts_than_the_checkpoint_has_are_named(experts_one_by_one):
    stored = StoredFormat(experts_one_by_one)
    with pytest.raises(
        ValueError, match=r"experts of .*down_proj make up \[12, 20, 10\], .* given \[4, 20, 10\]"
    ):
        stored.encode([(f"{EXPERTS}.down_proj", torch.zeros(4, 20, 10))])
    parts = stored.encode([(f"{EXPERTS}.down_proj", torch.ones(12, 20, 10))])
    with pytest.raises(
        ValueError, match=rf"'{EXPERTS}.down_proj': comes without {EXPERTS}.11.down_proj.weight$"
    ):
        list(stored.decode(parts[:-2]))


@pytest.fixture(scope="module")
def stacked(tmp_path_factory):
    """Experts in one tensor for each layer, and their checkpoint in float8, which has them one by one."""
    root = tmp_path_factory.mktemp("stacked")
    tiny_family("qwen3_5_moe", root / "plain")
    words = ["--model-dir", str(root / "plain"), "--save-dir", str(root / "fp8")]
    assert to_fp8([*words, "--block-size", "32", "24"]) == 0
    return load_file(root / "plain" / "model.safetensors"), root / "fp8"


STACK = "model.language_model.layers.1.mlp.experts.gate_up_proj"


def test_experts_in_one_tensor_are_stored_one_by_one(stacked):
    plain, path = stacked
    assert plain[STACK].ndim == 3
    stored, wanted = StoredFormat(path), load_file(path / "model.safetensors")
    found = dict(stored.encode(plain.items()))
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype and torch.equal(_bits(tensor), _bits(wanted[name])), name
    again = dict(stored.decode(found.items()))
    assert again.keys() == plain.keys()
    assert torch.equal(again[STACK], _read(path, STACK))
