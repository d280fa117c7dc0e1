"""Reading checkpoints in parts, plain and quantised."""

import json
import math
import os

import pytest
import torch
from safetensors.torch import save_file

from slime.models import FAMILIES, HfConfigError
from slime.models.checkpoint import int4
from slime.models.checkpoint.load_shard import ShardSpec, load_shard
from slime.models.checkpoint.quantization import Quantization, read_quantization
from slime.models.checkpoint.safetensors_dir import SafetensorReader
from slime.models.checkpoint.weights_dir import WeightsReader
from slime.models.hf_config import HfConfig
from slime.models.rules import FusedGateUpRule, GateUpRule, QkvRule, Rule, Segment, VocabRule

BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [4, 4], "activation_scheme": "dynamic"}
INTEGERS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8}
FLOATS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}


def compressed(weights, **more):
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **more}


def checkpoint(path, tensors, quantization=None):
    path.mkdir(exist_ok=True)
    config = {} if quantization is None else {"quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def float8(*shape):
    return (torch.randn(shape) * 100).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("scale", "shape", "quantization"),
    [
        ("weight_scale_inv", (3, 2), BLOCKS),
        ("weight_scale", (1,), {**BLOCKS, "weight_block_size": None}),
        ("weight_scale", (), {"quant_method": "fp8"}),
        ("weight_scale", (10, 1), compressed(FLOATS)),
        ("weight_scale", (1,), compressed({**FLOATS, "strategy": "tensor"})),
        ("weight_scale", (3, 2), compressed({**FLOATS, "strategy": "block", "block_structure": [4, 4]})),
    ],
)
def test_float8_is_read_under_the_plain_name_and_in_parts(tmp_path, scale, shape, quantization):
    codes, scales = float8(10, 7), torch.rand(shape) + 0.5
    tensors = {
        "a.weight": codes,
        f"a.{scale}": scales,
        "b.weight": torch.randn(5, 3),
        "a.bias": torch.ones(2),
    }
    tensors["a.input_scale"] = torch.ones(1)
    path = checkpoint(tmp_path, tensors, quantization)
    rows, columns = scales.shape if scales.dim() == 2 else (1, 1)
    expected = torch.empty(10, 7, dtype=torch.float64)
    for row in range(10):
        for column in range(7):
            place = (row // math.ceil(10 / rows), column // math.ceil(7 / columns))
            expected[row, column] = codes[row, column].double() * scales.view(rows, columns)[place].double()
    with WeightsReader(path) as reader:
        assert sorted(reader.names()) == ["a.bias", "a.weight", "b.weight"]
        assert reader.quantized == {"a.weight"}
        assert reader.shape("a.weight") == (10, 7)
        assert (reader.dtype("a.weight"), reader.dtype("a.bias")) == (torch.float32, torch.float32)
        assert torch.equal(reader.read("a.weight"), expected.float())
        assert torch.equal(
            reader.read_part("a.weight", [slice(3, 9), slice(2, 6)]), expected[3:9, 2:6].float()
        )
        assert torch.equal(reader.read("b.weight"), tensors["b.weight"])
        assert dict(reader.items()).keys() == set(reader.names())


@pytest.mark.parametrize("group", [8, None])
def test_integers_are_read_under_the_plain_name_and_in_parts(tmp_path, group):
    codes = torch.randint(-8, 8, (6, 24), dtype=torch.int32)
    scale = (torch.rand(6, 3 if group else 1) + 0.5).bfloat16()
    tensors = {
        **{
            "a.weight_packed": int4.pack(codes),
            "a.weight_scale": scale,
            "a.weight_shape": torch.tensor([6, 24]),
        },
        "gate.weight": torch.randn(4, 4),
    }
    weights = INTEGERS if group else {**INTEGERS, "strategy": "channel"}
    path = checkpoint(tmp_path, tensors, compressed(weights, format="pack-quantized", ignore=["gate"]))
    expected = codes.double() * scale.double().repeat_interleave(24 // scale.shape[1], 1)
    with WeightsReader(path) as reader:
        assert sorted(reader.names()) == ["a.weight", "gate.weight"]
        assert reader.shape("a.weight") == (6, 24)
        assert torch.equal(reader.read("a.weight"), expected.float())
        assert torch.equal(
            reader.read_part("a.weight", [slice(1, 4), slice(5, 19)]), expected[1:4, 5:19].float()
        )


def test_without_a_config_of_quantisation_names_are_as_stored(tmp_path):
    path = checkpoint(tmp_path, {"a.weight": float8(4, 4), "a.weight_scale_inv": torch.ones(1, 1)})
    with WeightsReader(path) as reader:
        assert sorted(reader.names()) == ["a.weight", "a.weight_scale_inv"]
        assert reader.read("a.weight").dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("tensors", "quantization", "said"),
    [
        ({"a.weight": float8(4, 4)}, BLOCKS, "a.weight is quantised and has no a.weight_scale_inv"),
        (
            {"a.weight": float8(9, 4), "a.weight_scale_inv": torch.ones(2, 1)},
            BLOCKS,
            r"a.weight_scale_inv is \[2, 1\], wanted \[3, 1\] for a.weight \[9, 4\]",
        ),
        (
            {"a.weight": float8(2, 4, 4), "a.weight_scale_inv": torch.ones(2, 1)},
            BLOCKS,
            r"a.weight is quantised and \[2, 4, 4\], no matrix",
        ),
        (
            {
                **{
                    "a.weight_packed": torch.zeros(2, 2, dtype=torch.int32),
                    "a.weight_scale": torch.ones(2, 2),
                },
                "a.weight_shape": torch.tensor([2, 32]),
            },
            compressed(INTEGERS),
            r"a.weight_packed is \[2, 2\], not \[2, 32\] packed",
        ),
        (
            {
                **{
                    "a.weight_packed": torch.zeros(2, 2, dtype=torch.int32),
                    "a.weight_scale": torch.ones(2, 1),
                },
                "a.weight_shape": torch.tensor([2, 16]),
            },
            compressed(INTEGERS),
            r"a.weight_scale is \[2, 1\], not one for 8 columns",
        ),
    ],
)
def test_scales_that_do_not_fit_are_named(tmp_path, tensors, quantization, said):
    path = checkpoint(tmp_path, tensors, quantization)
    with pytest.raises(ValueError, match=said), WeightsReader(path) as reader:
        reader.read("a.weight")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_scales_that_are_not_finite_are_named_with_their_file(tmp_path, kind, value):
    scale = torch.ones(4, 3)
    scale[2, 1] = value
    if kind == "fp8":
        name, tensors = "a.weight_scale_inv", {"a.weight": float8(16, 12), "a.weight_scale_inv": scale}
    else:
        name, tensors = "a.weight_scale", {"a.weight_packed": torch.zeros(4, 3, dtype=torch.int32)}
        tensors |= {name: scale.bfloat16(), "a.weight_shape": torch.tensor([4, 24])}
    path = checkpoint(tmp_path, tensors, BLOCKS if kind == "fp8" else compressed(INTEGERS))
    with WeightsReader(path) as reader:
        said = rf"model\.safetensors: {name} has 1 scales that are not finite"
        with pytest.raises(ValueError, match=said):
            reader.read("a.weight")
        reader.read_part("a.weight", [slice(0, 2)])  # a part that it does not touch


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"a.weight": torch.ones(2, 16)}, "has a.weight_packed, and a.weight as well"),
        ({"a.weight_packed": torch.zeros(2, 2, dtype=torch.int64)}, "is torch.int64, wanted torch.int32"),
        ({"a.weight_shape": torch.tensor([2, 16, 1])}, r"a.weight_shape is \[2, 16, 1\], wanted rows"),
        ({"a.weight_shape": torch.tensor(16)}, "a.weight_shape is 16, wanted rows and columns"),
    ],
)
def test_packed_weights_that_are_not_whole_or_not_alone_are_named(tmp_path, changes, said):
    tensors = {
        "a.weight_packed": torch.zeros(2, 2, dtype=torch.int32),
        "a.weight_scale": torch.ones(2, 2),
        "a.weight_shape": torch.tensor([2, 16]),
    }
    with WeightsReader(checkpoint(tmp_path, tensors, compressed(INTEGERS))) as reader:
        assert reader.read("a.weight").shape == (2, 16)
    path = checkpoint(tmp_path, tensors | changes, compressed(INTEGERS))
    with pytest.raises(ValueError, match=said), WeightsReader(path) as reader:
        reader.read("a.weight")


@pytest.mark.parametrize(
    ("name", "codes", "quantization"),
    [
        ("a.gate_up_proj", float8(2, 4, 4), BLOCKS),  # of all experts of a layer
        ("a.bias", float8(4), BLOCKS),
        ("a.weight", torch.zeros(4, 16, dtype=torch.int8), compressed(INTEGERS)),  # one to a byte
    ],
)
def test_codes_are_never_taken_for_weights(tmp_path, name, codes, quantization):
    scales = {"a.weight_scale": torch.ones(4, 2), "a.gate_up_proj_scale_inv": torch.ones(2, 1, 1)}
    path = checkpoint(tmp_path, {name: codes, **scales}, quantization)
    said = rf"{name} is torch\.\w+: quantised in a way that is not read"
    with pytest.raises(ValueError, match=said), WeightsReader(path):
        pass


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            "quant_method 'gptq' is not supported .wanted: fp8, compressed-tensors, mxfp4 or mxfp8",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            "quant_method 'modelopt NVFP4' is not supported",
        ),
        (compressed(INTEGERS, format="nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized'"),
        ({"quant_method": "mxfp8", "fmt": "e5m2"}, "fmt 'e5m2' is not supported .wanted: e4m3"),
        ({"quant_method": "mxfp8", "scale_fmt": "float"}, "scale_fmt 'float' .*wanted: ue8m0"),
        (
            {"quant_method": "mxfp8", "weight_block_size": [128, 128]},
            r"weight_block_size \[128, 128\] .*wanted: \[1, 32\]",
        ),
        ({"bits": 4}, "quant_method None is not supported"),
        ({**BLOCKS, "fmt": "e5m2"}, "fmt 'e5m2' is not supported .wanted: e4m3"),
        ({**BLOCKS, "weight_block_size": [128]}, r"weight_block_size \[128\]"),
        (compressed({**INTEGERS, "symmetric": False}), "group_0.weights.symmetric False"),
        (compressed({**INTEGERS, "actorder": "group"}), "group_0.weights.actorder 'group'"),
        (compressed({**INTEGERS, "num_bits": 8}), "'int of 8 bits' is not supported"),
        (compressed({**INTEGERS, "group_size": None}), "group_size None"),
        (compressed({**INTEGERS, "group_size": 0}), "group_size 0"),
        (compressed({**INTEGERS, "strategy": "tensor"}), "strategy 'tensor'"),
        (compressed({**FLOATS, "num_bits": 4}), "'float of 4 bits' is not supported"),
        (compressed(None), "group_0.weights None"),
        ({**compressed(INTEGERS), "config_groups": {"a": 1}}, "a.weights None"),
        ({**compressed(INTEGERS), "config_groups": {}}, "config_groups {}"),
        ({**BLOCKS, "weight_block_size": [4, 0]}, r"weight_block_size \[4, 0\]"),
        (compressed({**FLOATS, "strategy": "token"}), "strategy 'token'"),
        (compressed(INTEGERS, sparsity_config={"format": "sparse-24"}), "sparsity_config.format 'sparse-24'"),
        ({"quant_method": "compressed-tensors"}, "config_groups None"),
        (
            {**compressed(INTEGERS), "config_groups": {"a": {"weights": INTEGERS}, "b": {"weights": FLOATS}}},
            "one way",
        ),
    ],
)
def test_other_ways_are_refused_by_name(quantization, said):
    with pytest.raises(HfConfigError, match=f"config.json: quantization_config: .*{said}"):
        read_quantization(HfConfig({"quantization_config": quantization}))


def test_the_older_key_is_read_too():
    config = HfConfig({"compression_config": compressed(INTEGERS)})
    assert read_quantization(config) == Quantization("int4", group=8)


class Shape:
    padded_vocab_size = 16
    num_query_groups = 4


RULES = {
    "one": (Rule(("a",)), [(16, 6)]),
    "vocabulary": (VocabRule(("a",)), [(13, 6)]),
    "qkv": (QkvRule(("a", "b", "c")), [(16, 6), (8, 6), (8, 6)]),
    "qkv bias": (QkvRule(("a", "b", "c")), [(16,), (8,), (8,)]),
    "gate and up": (GateUpRule(("a", "b")), [(8, 6), (8, 6)]),
    "fused": (FusedGateUpRule(("a",)), [(16, 6)]),
}


class Backwards(Rule):
    """A rule that rows do not describe."""

    def merge(self, tensors, shape):
        return tensors[0].flip(0)


RULES["of its own"] = (Backwards(("a",)), [(16, 6)])


def sharded(rule, full, dim, rank, size):
    """Returns a rank's part of a tensor: what `unshard` undoes."""
    if isinstance(rule, GateUpRule):
        return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
    return full.chunk(size, dim)[rank]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", RULES)
def test_a_rank_is_filled_with_its_part(tmp_path, name, size):
    rule, shapes = RULES[name]
    tensors = {key: torch.randn(shape) for key, shape in zip("abc", shapes, strict=False)}
    path = checkpoint(tmp_path, tensors)
    full = rule.merge(list(tensors.values()), Shape)
    with SafetensorReader(path) as reader:
        # Gate and up are never cut along their columns.
        for dim in range(1 if size != 2 or isinstance(rule, GateUpRule) else full.dim()):
            parts = []
            for rank in range(size):
                expected = sharded(rule, full, dim, rank, size)
                param = torch.full_like(expected, float("nan"))
                load_shard(param, rule, reader, Shape, ShardSpec(dim, rank, size), "for it")
                assert torch.equal(param, expected), (dim, rank)
                parts.append(param)
            assert torch.equal(rule.unshard(parts, dim), full)


def test_blocks_of_a_large_tensor_are_put_together(tmp_path, monkeypatch):
    monkeypatch.setattr("slime.models.checkpoint.weights_dir._BLOCK_BYTES", 100)
    monkeypatch.setattr("slime.models.checkpoint.safetensors_dir._MAPPED_BYTES", 200)
    codes, scale = float8(40, 8), torch.rand(10, 2) + 0.5
    path = checkpoint(tmp_path, {"a.weight": codes, "a.weight_scale_inv": scale}, BLOCKS)
    expected = codes.float() * scale.repeat_interleave(4, 0).repeat_interleave(4, 1)
    with WeightsReader(path) as reader:
        param = torch.empty(40, 4)
        load_shard(param, Rule(("a.weight",)), reader, Shape, ShardSpec(1, 1, 2), "for it")
        assert torch.equal(param, expected[:, 4:])
        assert torch.equal(reader.read("a.weight"), expected)


def test_columns_come_by_several_mappings_in_the_format_of_the_parameter(tmp_path, monkeypatch):
    monkeypatch.setattr("slime.models.checkpoint.tensor_slices._MAPPED_BYTES", 100)
    whole = torch.randn(41, 8)
    path = checkpoint(tmp_path, {"a": torch.randn(3), "b": whole})
    with SafetensorReader(path) as reader:
        param = torch.empty(41, 4, dtype=torch.bfloat16)
        load_shard(param, Rule(("b",)), reader, Shape, ShardSpec(1, 1, 2), "for it")
        assert torch.equal(param, whole[:, 4:].bfloat16())
        file = path / "model.safetensors"
        os.truncate(file, file.stat().st_size - 4)
        with pytest.raises(OSError, match="ends before byte"):
            reader.copy_rows(param, "b", range(41), [slice(4, 8)])


def test_a_mapping_ends_after_some_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("slime.models.checkpoint.safetensors_dir._MAPPED_BYTES", 1000)
    path = checkpoint(tmp_path, {"a": torch.randn(100, 4)})
    with SafetensorReader(path) as reader:
        reader.read_part("a", [slice(0, 50), slice(0, 1)])
        assert reader._open
        reader.read_part("a", [slice(0, 50), slice(0, 1)])
        assert not reader._open


def test_mappings_of_many_files_end_after_as_many_bytes_together(tmp_path, monkeypatch):
    monkeypatch.setattr("slime.models.checkpoint.safetensors_dir._MAPPED_BYTES", 1000)
    values = [torch.full((100,), float(number)) for number in range(8)]
    for number, value in enumerate(values):
        save_file({f"w{number}": value}, tmp_path / f"model-{number}.safetensors")
    with SafetensorReader(tmp_path) as reader:
        reader._open.clear()
        for _ in range(2):
            for number, value in enumerate(values):
                assert torch.equal(reader.read(f"w{number}"), value)
                assert len(reader._open) <= 2


@pytest.mark.parametrize(
    ("shapes", "param", "said"),
    [
        ([(8, 6), (8, 5)], (16, 6), r"a \[8, 6\], b \[8, 5\] do not go together for it, wanted \[16, 6\]"),
        ([(8, 6), (6, 6)], (16, 6), r"give \[14, 6\] for it, wanted \[16, 6\]"),
        ([(8,), (8,)], (16, 6), "do not go together"),
        ([(), ()], (16, 6), "do not go together"),
    ],
)
def test_tensors_of_another_shape_are_named(tmp_path, shapes, param, said):
    path = checkpoint(tmp_path, {key: torch.zeros(shape) for key, shape in zip("ab", shapes, strict=True)})
    with SafetensorReader(path) as reader, pytest.raises(ValueError, match=said):
        load_shard(torch.zeros(param), GateUpRule(("a", "b")), reader, Shape, ShardSpec(), "for it")


def test_a_rule_says_either_which_rows_or_how_to_merge():
    rules = [
        rule
        for family in FAMILIES.values()
        for table in (
            family.weights.of_model,
            family.weights.of_layer,
            getattr(family.weights.experts, "of_layer", {}),
        )
        for rule in table.values()
    ]
    for kind in {type(rule) for rule in rules}:
        assert not ("layout" in vars(kind) and "merge" in vars(kind) and kind is not Rule), kind


def test_segments_are_rows_of_tensors():
    assert VocabRule(("a",)).layout([13], Shape) == [Segment(0, 0, 13), Segment(None, 0, 3)]
