"""Experts in MXFP4: read as ``transformers`` reads them, refused by name, and made of plain weights."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from slime.models import HfConfigError
from slime.models.checkpoint import encoding, mxfp4
from slime.models.checkpoint.encoding import Mxfp4Encoding
from slime.models.checkpoint.load_shard import ShardSpec, load_shard
from slime.models.checkpoint.quantization import Quantization, read_quantization
from slime.models.checkpoint.stored_format import StoredFormat
from slime.models.checkpoint.weights_dir import WeightsReader
from slime.models.families.gpt_oss import FAMILY
from slime.models.hf_config import HfConfig

CONFIG = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
EXPERTS = "model.layers.0.mlp.experts"
UP, DOWN = f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def stored(name, experts, outputs, groups, seed=0, scales=(110, 135)):
    """Any bytes, and scales in a range."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{name}_blocks": torch.randint(
            256, (experts, outputs, groups, 16), dtype=torch.uint8, generator=generator
        ),
        f"{name}_scales": torch.randint(
            *scales, (experts, outputs, groups), dtype=torch.uint8, generator=generator
        ),
    }


def checkpoint(path, *files):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    for number, tensors in enumerate(files):
        save_file(tensors, path / f"model-{number}.safetensors")
    return path


def reference(tensors, name, dtype=torch.float32):
    return convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"], dtype=dtype)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.fixture
def experts():
    """Makes the tensors of two layers; numbers and scales of one matrix are in different files."""
    tensors = stored(UP, 3, 10, 2) | stored(DOWN, 3, 64, 1, seed=1)
    tensors[f"{DOWN}_blocks"][1] = 0
    tensors[f"{DOWN}_scales"][1] = 0
    plain = {f"{UP}_bias": torch.randn(3, 10).bfloat16(), f"{DOWN}_bias": torch.randn(3, 64).bfloat16()}
    return tensors, plain


def test_weights_are_those_of_transformers_under_the_plain_names(experts, tmp_path):
    tensors, plain = experts
    scales = {f"{UP}_scales": tensors[f"{UP}_scales"]}
    rest = {name: tensor for name, tensor in tensors.items() if name not in scales}
    with WeightsReader(checkpoint(tmp_path, rest | plain, scales)) as reader:
        assert {*reader.names()} == {UP, DOWN, *plain}
        assert reader.quantized == {UP, DOWN}
        assert reader.file_of(UP) == "model-0.safetensors"
        for name, shape in ((UP, (3, 64, 10)), (DOWN, (3, 32, 64))):
            assert (reader.shape(name), reader.dtype(name)) == (shape, torch.float32)
            found = reader.read(name)
            assert torch.equal(bits(found), bits(reference(tensors, name)))
            assert torch.equal(bits(found.bfloat16()), bits(reference(tensors, name, torch.bfloat16)))
        assert not reader.read(DOWN)[1].any()
        assert all(torch.equal(reader.read(name), tensor) for name, tensor in plain.items())


@pytest.mark.parametrize("scale", [0, 1, 126, 127, 128, 252, 253, 254])
def test_every_byte_with_odd_scales(scale, tmp_path):
    """The largest scales have numbers that float32 cannot hold, which are left out here."""
    tensors = {
        f"{UP}_blocks": torch.arange(256, dtype=torch.uint8).view(1, 8, 2, 16),
        f"{UP}_scales": torch.full((1, 8, 2), scale, dtype=torch.uint8),
    }
    wanted = reference(tensors, UP)
    too_large = ~torch.isfinite(wanted.transpose(1, 2).reshape(-1, 2)).all(dim=1)
    assert bool(too_large.any()) == (scale > 252) and not too_large.all()
    tensors[f"{UP}_blocks"].view(-1)[too_large] = 0
    with WeightsReader(checkpoint(tmp_path, tensors)) as reader:
        assert torch.equal(bits(reader.read(UP)), bits(reference(tensors, UP)))


@pytest.mark.parametrize(("scale", "byte"), [(255, 0), (255, 0x22), (254, 0x44), (253, 0x70)])
def test_numbers_that_are_none_are_refused_with_tensor_and_file(scale, byte, tmp_path):
    tensors = stored(UP, 2, 4, 1)
    tensors[f"{UP}_scales"][1, 2, 0] = scale
    tensors[f"{UP}_blocks"][1, 2, 0] = torch.tensor([0] * 5 + [byte] + [0] * 10)
    path = checkpoint(tmp_path, tensors)
    said = rf"model-0.safetensors: {UP}_scales has numbers that are not finite .scale {scale}"
    with WeightsReader(path) as reader:
        reader.read_part(UP, [slice(0, 1)])
        with pytest.raises(ValueError, match=said):
            reader.read(UP)
    with pytest.raises(ValueError, match=f"weight '{UP}': has numbers that are not finite"):
        list(StoredFormat(path).decode(tensors.items()))


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_part_is_read_by_itself(tmp_path_factory, data):
    tensors = stored(UP, 3, 10, 3)
    path = tmp_path_factory.getbasetemp() / "parts"
    with WeightsReader(checkpoint(path, tensors)) as reader:
        box = []
        for size in (3, 96, 10):
            start = data.draw(st.integers(0, size))
            box.append(slice(start, data.draw(st.integers(start, size))))
        box = box[: data.draw(st.integers(1, 3))]
        assert torch.equal(reader.read_part(UP, box), reference(tensors, UP)[tuple(box)])


def test_a_rank_reads_its_own_experts_and_no_other(experts, tmp_path, monkeypatch):
    tensors, plain = experts
    touched = []
    dequantize = mxfp4.dequantize

    def watched(blocks, scales):
        touched.append(blocks.shape[0])
        return dequantize(blocks, scales)

    monkeypatch.setattr(mxfp4, "dequantize", watched)
    up, down = reference(tensors, UP), reference(tensors, DOWN)
    rules = FAMILY.weights.experts
    with WeightsReader(checkpoint(tmp_path, tensors | plain)) as reader:
        for name, wanted in (
            ("linear_fc1.weight", torch.cat([up[2, :, 0::2].T, up[2, :, 1::2].T])),
            ("linear_fc2.weight", down[2].T),
        ):
            rule = rules.rule_for(f"mlp.experts.local_experts.2.{name}").under("model.layers.0.")
            param = torch.full_like(wanted, float("nan"))
            load_shard(param, rule, reader, None, ShardSpec(), "for it")
            assert torch.equal(param, wanted)
        assert touched == [1, 1]
        monkeypatch.setattr("slime.models.checkpoint.weights_dir._BLOCK_BYTES", 1)
        reader.read(UP)
        target = torch.empty(2, 64, 4, dtype=torch.bfloat16)
        reader.copy_rows(target, UP, range(1, 3), [slice(None), slice(3, 7)])
        assert torch.equal(target, up[1:, :, 3:7].bfloat16())
    assert set(touched) == {1}  # a layer's experts are not dequantised at once


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(f"{UP}_scales"), f"{UP}_blocks is there and no {UP}_scales"),
        (lambda t: t.pop(f"{UP}_blocks"), f"{UP}_scales is there and no {UP}_blocks"),
        (lambda t: t.update({UP: torch.zeros(3, 64, 10)}), f"has {UP}_blocks, and {UP} as well"),
        (
            lambda t: t.update({f"{UP}_scales": t[f"{UP}_scales"][:, :9].clone()}),
            rf"{UP}_scales is \[3, 9, 2\], wanted \[3, 10, 2\] for {UP}_blocks \[3, 10, 2, 16\]",
        ),
        (
            lambda t: t.update({f"{UP}_blocks": t[f"{UP}_blocks"].view(3, 10, 4, 8)}),
            rf"{UP}_blocks is \[3, 10, 4, 8\], wanted \[experts, outputs, groups, 16\]",
        ),
        (
            lambda t: t.update({f"{UP}_blocks": t[f"{UP}_blocks"].flatten(2)}),
            rf"{UP}_blocks is \[3, 10, 32\], wanted \[experts, outputs, groups, 16\]",
        ),
        (
            lambda t: t.update({f"{UP}_scales": t[f"{UP}_scales"].float()}),
            rf"{UP}_scales is torch.float32, wanted torch.uint8",
        ),
    ],
)
def test_what_does_not_go_together_is_named_with_its_file(experts, tmp_path, change, said):
    tensors, plain = experts
    tensors = {name: tensor.clone() for name, tensor in (tensors | plain).items()}
    change(tensors)
    with pytest.raises(ValueError, match=f"^{tmp_path}/model-0.safetensors: {said}"):
        WeightsReader(checkpoint(tmp_path, tensors))


def test_other_codes_are_never_taken_for_weights(experts, tmp_path):
    tensors, _ = experts
    tensors["a.weight"] = torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"a.weight is torch.uint8: quantised in a way that is not read"):
        WeightsReader(checkpoint(tmp_path, tensors))


def test_other_families_in_this_format_are_refused():
    """Whether their matrices are transposed is not known."""
    assert read_quantization(HfConfig(CONFIG)) == Quantization("mxfp4", group=32, power_of_two=True)
    with pytest.raises(HfConfigError, match=r"quant_method 'mxfp4' .*gpt_oss alone; this is 'qwen3_moe'"):
        read_quantization(HfConfig({**CONFIG, "model_type": "qwen3_moe"}))


def nearest(value, scale):
    """The numbers of the format that are closest to it, times the scale; in float64."""
    distance = (VALUES * scale - abs(value)).abs()
    return [float(near) for near in VALUES[distance == distance.min()] * scale]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.floats(-8, 8, width=32), st.sampled_from([0.25, -0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.0])
        ),
        min_size=32,
        max_size=32,
    ),
    st.integers(-126, 120),
)
def test_numbers_are_rounded_to_the_nearest_and_to_even(values, exponent):
    group = torch.ldexp(torch.tensor(values), torch.tensor(exponent))
    blocks, scales = mxfp4.quantize(group[None])
    found = mxfp4.dequantize(blocks, scales)[0]
    scale = 2.0 ** (int(scales) - 127)
    largest = float(group.abs().max())
    assert scale == 1 if largest == 0 else largest <= 7 * scale
    assert scale <= 2.0**-127 or largest == 0 or largest > 3.5 * scale  # no smaller one would do
    for value, number in zip(group.double().tolist(), found.double().tolist(), strict=True):
        close = nearest(value, scale) if abs(value) <= 6 * scale else [6 * scale]
        assert abs(number) in close
        if len(close) == 2:
            index = (VALUES * scale).tolist().index(abs(number))
            assert index % 2 == 0
        assert torch.signbit(torch.tensor(number)) == torch.signbit(torch.tensor(value))
    assert all(torch.equal(*pair) for pair in zip(mxfp4.quantize(found[None]), (blocks, scales), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_a_checkpoint_come_back_as_they_were(dtype):
    """In bfloat16 too, which holds them all. Where no number is 4 or 6 the scale may be another one."""
    tensors = stored(UP, 4, 12, 5, scales=(0, 252))
    weight = reference(tensors, UP, dtype)
    again = Mxfp4Encoding(UP, (4, 160, 12)).encode(weight)
    assert torch.equal(bits(reference(again, UP, dtype)), bits(weight))
    codes = torch.stack([tensors[f"{UP}_blocks"] & 7, tensors[f"{UP}_blocks"] >> 4 & 7]).amax(dim=(0, -1))
    usual = codes >= 6
    assert usual.any()
    for name in tensors:
        assert torch.equal(again[name][usual], tensors[name][usual])


def test_strips_of_experts_change_nothing(monkeypatch):
    weight = torch.randn(3, 64, 10)
    made = Mxfp4Encoding(UP, (3, 64, 10))
    whole = made.encode(weight)
    monkeypatch.setattr(encoding, "_STRIP_BYTES", 4 * 64 * 3)
    assert all(torch.equal(part, whole[name]) for name, part in made.encode(weight).items())
    assert {name: (part.dtype, part.shape) for name, part in whole.items()} == made.specs()
    assert torch.equal(made.decode(whole), reference(whole, UP))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 3.4e38])
def test_numbers_that_cannot_be_stored_are_named(number, tmp_path):
    path = checkpoint(tmp_path, stored(UP, 2, 4, 1))
    weight = torch.zeros(2, 32, 4)
    weight[1, 3, 2] = number
    with pytest.raises(ValueError, match=f"{UP}: has numbers that are not finite, or too large"):
        StoredFormat(path).encode([(UP, weight)])
    with pytest.raises(ValueError, match=rf"{UP} is \[2, 32, 4\], and .* given \[2, 4, 32\]"):
        StoredFormat(path).encode([(UP, torch.zeros(2, 4, 32))])
    with pytest.raises(ValueError, match="has 33 columns, no multiple of a group of 32"):
        mxfp4.quantize(torch.zeros(2, 33))
