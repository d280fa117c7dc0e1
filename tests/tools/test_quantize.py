"""The converters of number formats: there and back, what they leave alone, and what they refuse."""

import json
import resource
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from slime.models.checkpoint.weights_dir import WeightsReader
from tests.families import tiny_family
from tests.weight_sync.reference_formats import mxfp8
from tools import (
    convert_hf_to_fp8,
    convert_hf_to_int4,
    convert_hf_to_mxfp4,
    convert_hf_to_mxfp8,
    fp8_cast_bf16,
)
from tools.rewrite_checkpoint import rewrite

FP8 = convert_hf_to_fp8.main
INT4 = convert_hf_to_int4.main
MXFP4 = convert_hf_to_mxfp4.main
MXFP8 = convert_hf_to_mxfp8.main


def words(source, target, *more):
    return ["--model-dir", str(source), "--save-dir", str(target), *map(str, more)]


def dequantized(path):
    """By name, of the stored tensors alone, in float64."""
    stored = {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    block = config.get("weight_block_size")
    found = {}
    for name, value in stored.items():
        scale = stored.get(f"{name}_scale_inv", stored.get(f"{name}_scale"))
        if name.endswith("_packed"):
            rows, columns = stored[name.replace("_packed", "_shape")].tolist()
            nibbles = [
                [(int(word) >> (4 * place)) % 16 - 8 for word in row for place in range(8)] for row in value
            ]
            scale = stored[name.replace("_packed", "_scale")].double()
            wide = scale.repeat_interleave(columns // scale.shape[1], 1)
            found[name.removesuffix("_packed")] = torch.tensor(nibbles).double().view(rows, columns) * wide
        elif scale is not None:
            wide = scale.double().view(-1, scale.shape[1] if scale.dim() == 2 else 1)
            if block:
                wide = wide.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
                wide = wide[: value.shape[0], : value.shape[1]]
            found[name] = value.double() * wide
        elif not name.endswith(("_scale", "_shape", "_scale_inv")):
            found[name] = value.double()
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Experts, biases, norms, a matrix of zeros, sizes that are no multiple of 128; in several files."""
    path = tmp_path_factory.mktemp("source")
    tiny_family("qwen2_moe", path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.weight"].zero_()
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, path / f"part{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"part{number}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (path / "tokenizer.json").write_text("{}")
    return path, tensors


@pytest.mark.parametrize(
    ("flags", "worst"),
    [
        (["--strategy", "block"], 2**-4),
        (["--strategy", "block", "--block-size", 48, 20, "--max-workers", 2, "--scale-fmt", "ue8m0"], 2**-4),
        (["--strategy", "channel"], 2**-4),
        (["--strategy", "tensor"], 2**-4),
    ],
)
def test_float8_and_back(source, tmp_path, flags, worst):
    path, tensors = source
    out = tmp_path / "out"
    assert FP8(words(path, out, *flags)) == 0
    exact = dequantized(out)
    assert exact.keys() == tensors.keys()
    with WeightsReader(out) as reader:
        assert {*reader.names()} == {*tensors}
        converted = reader.quantized
        for name, tensor in tensors.items():
            assert torch.equal(reader.read(name).double(), exact[name].float().double()), name
            error = (exact[name] - tensor.double()).abs()
            if name not in converted:
                assert not error.any()
            else:
                smallest = tensor.abs().max() / 448 * 2**-9
                assert (error <= (tensor.abs().double() * worst).clamp(min=smallest)).all(), name
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in converted
    assert "model.layers.0.self_attn.o_proj.weight" in converted
    kept = ("norm", "embed", "lm_head", "mlp.gate.", "shared_expert_gate", "bias")
    assert not [name for name in converted if any(word in name for word in kept)]
    assert (out / "tokenizer.json").read_text() == "{}"
    described = json.loads((out / "config.json").read_text())["quantization_config"]
    listed = described.get("modules_to_not_convert") or described["ignore"]
    assert "model.layers.0.mlp.gate" in listed and "lm_head" in listed
    assert not any(f"{module}.weight" in converted for module in listed)


def test_experts_in_one_tensor_are_converted_one_by_one_and_read_as_they_were(tmp_path):
    model = tiny_family("qwen3_5_moe", tmp_path / "in")
    before, out = load_file(tmp_path / "in/model.safetensors"), tmp_path / "out"
    assert FP8(words(tmp_path / "in", out, "--block-size", 16, 16)) == 0
    exact, experts = dequantized(out), "model.language_model.layers.1.mlp.experts"
    with WeightsReader(out) as reader:
        assert {*reader.names()} == {*before}
        both = [exact[f"{experts}.2.{part}_proj.weight"] for part in ("gate", "up")]
        box = [slice(2, 3), slice(3, 70)]
        assert torch.equal(reader.read_part(f"{experts}.gate_up_proj", box)[0], torch.cat(both)[3:70].float())
        assert f"{experts}.down_proj" in reader.quantized
        tower = [name for name in before if "visual" in name]
        assert tower and all(torch.equal(reader.read(name), before[name]) for name in tower)
    model.save_pretrained(tmp_path / "apart")  # transformers writes experts one by one
    assert f"{experts}.0.up_proj.weight" in load_file(tmp_path / "apart/model.safetensors")
    with WeightsReader(tmp_path / "apart") as reader:
        assert all(torch.equal(tensor, before[name]) for name, tensor in reader.items())


def test_an_index_names_every_tensor_and_its_file(source, tmp_path):
    out = tmp_path / "out"
    assert FP8(words(source[0], out)) == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    stored = {file.name: load_file(file) for file in out.glob("*.safetensors")}
    assert index["weight_map"] == {name: file for file, tensors in stored.items() for name in tensors}
    total = sum(tensor.nbytes for tensors in stored.values() for tensor in tensors.values())
    assert index["metadata"]["total_size"] == total


def test_integers_and_back(source, tmp_path):
    path, tensors = source
    out = tmp_path / "out"
    assert INT4(words(path, out, "--group-size", 8)) == 0
    exact = dequantized(out)
    assert exact.keys() == tensors.keys()
    with WeightsReader(out) as reader:
        for name, tensor in tensors.items():
            assert torch.equal(reader.read(name).double(), exact[name].float().double()), name
            largest = tensor.double().abs().max()
            assert (exact[name] - tensor.double()).abs().max() <= (
                largest / 14 * 1.001 if name in reader.quantized else 0
            )
        experts = {name for name in tensors if ".experts." in name}
        assert reader.quantized == experts != set()


def test_rows_that_are_no_multiple_of_a_group_stay_as_they_are(source, tmp_path):
    out = tmp_path / "out"
    assert INT4(words(source[0], out, "--ignore-rules", "lm_head", r"re:.*mlp\.gate$")) == 0
    with WeightsReader(out) as reader:
        assert "model.layers.0.mlp.experts.0.gate_proj.weight" in reader.quantized  # of 64
        assert "model.layers.0.mlp.experts.0.down_proj.weight" not in reader.quantized  # of 48
        assert not {"lm_head.weight", "model.layers.0.mlp.gate.weight"} & reader.quantized
        assert "model.embed_tokens.weight" in reader.quantized
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored[:2] == ["lm_head", r"re:.*mlp\.gate$"]
    assert "model.layers.0.mlp.experts.0.down_proj" in ignored


@pytest.mark.parametrize("convert", [FP8, INT4])
def test_a_plain_copy_of_it_has_no_word_of_quantisation(source, tmp_path, convert, capsys):
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    assert convert(words(source[0], quantized)) == 0
    back = ["--input-fp8-hf-path", str(quantized), "--output-bf16-hf-path", str(plain)]
    assert fp8_cast_bf16.main(back) == 0
    with WeightsReader(quantized) as old, WeightsReader(plain) as new:
        assert not new.quantized and {*old.names()} == {*new.names()}
        for name in old.names():
            expected = old.read(name)
            assert torch.equal(new.read(name), expected.bfloat16() if name in old.quantized else expected)
    assert "quantization_config" not in json.loads((plain / "config.json").read_text())
    back[1] = str(plain)
    back[3] = str(tmp_path / "more")
    assert fp8_cast_bf16.main(back) == 2
    assert f"error: {plain}: is not quantised" in capsys.readouterr().err


def test_mxfp4_and_back(tmp_path):
    plain, packed, again = (tmp_path / name for name in ("plain", "packed", "again"))
    tiny_family("gpt_oss", plain)
    assert MXFP4(words(plain, packed)) == 0
    before, stored = (load_file(path / "model.safetensors") for path in (plain, packed))
    assert fp8_cast_bf16.main(["--input-fp8-hf-path", str(packed), "--output-bf16-hf-path", str(again)]) == 0
    after = load_file(again / "model.safetensors")
    assert "quantization_config" not in json.loads((again / "config.json").read_text())
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        if f"{name}_blocks" not in stored:
            assert torch.equal(stored[name], tensor) and torch.equal(after[name], tensor)
            continue
        exact = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
        assert torch.equal(after[name], exact)
        # Half of the widest gap, 2, at the largest scale that does not cut a number off.
        assert ((exact.float() - tensor).abs() <= tensor.abs().max() / 3.5).all()
    converted = {name for name in before if f"{name}_blocks" in stored}
    assert converted == {
        name for name in before if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    }
    assert len(converted) == 2 * 4
    model = transformers.AutoModelForCausalLM.from_pretrained(again, dtype=torch.float32)
    assert not hasattr(model.config, "quantization_config")


def test_mxfp8_and_back(tmp_path, capsys):
    """The matrices that float8 leaves alone stay; numbers that came out of it once stay too, bit for bit."""
    plain, packed, again, twice = (tmp_path / name for name in ("plain", "packed", "again", "twice"))
    tiny_family("qwen2_moe", plain, moe_intermediate_size=64, shared_expert_intermediate_size=96)
    assert MXFP8(words(plain, packed, "--max-workers", 2)) == 0
    assert FP8(words(plain, tmp_path / "fp8")) == 0
    before, stored = (load_file(path / "model.safetensors") for path in (plain, packed))
    assert {*stored} == {*load_file(tmp_path / "fp8/model.safetensors")}
    described = json.loads((packed / "config.json").read_text())["quantization_config"]
    float8 = json.loads((tmp_path / "fp8/config.json").read_text())["quantization_config"]
    powers = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}
    assert described == float8 | powers
    for name, tensor in before.items():
        if f"{name}_scale_inv" not in stored:
            assert torch.equal(stored[name], tensor)
            continue
        codes, scales, _ = map(torch.from_numpy, mxfp8(tensor.numpy()))
        assert torch.equal(stored[name].view(torch.uint8), codes), name
        assert torch.equal(stored[f"{name}_scale_inv"], scales), name
    assert fp8_cast_bf16.main(["--input-fp8-hf-path", str(packed), "--output-bf16-hf-path", str(again)]) == 0
    assert MXFP8(words(again, twice)) == 0
    after, cast = load_file(twice / "model.safetensors"), load_file(again / "model.safetensors")
    for name in before.keys() - {"model.embed_tokens.weight"}:
        if f"{name}_scale_inv" in stored:
            exact = mxfp8(before[name].numpy())[2]
            assert torch.equal(cast[name].float(), torch.from_numpy(exact)), name  # bfloat16 holds them all
            found = after[name].double() * (
                2.0 ** (after[f"{name}_scale_inv"].double() - 127)
            ).repeat_interleave(32, 1)
            assert torch.equal(found, torch.from_numpy(exact).double()), name
    tiny_family("qwen2_moe", tmp_path / "odd", shared_expert_intermediate_size=64)
    assert MXFP8(words(tmp_path / "odd", tmp_path / "out")) == 2
    said = "mlp.experts.0.down_proj.weight: has 48 columns, no multiple of a group of 32"
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_mxfp8_leaves_alone_what_sglang_takes_apart(tmp_path):
    tiny_family("deepseek_v3", tmp_path / "in", q_lora_rank=32, moe_intermediate_size=64)
    assert MXFP8(words(tmp_path / "in", tmp_path / "out")) == 0
    with WeightsReader(tmp_path / "out") as reader:
        attention = "model.layers.0.self_attn"
        of_layer = {name.split(".")[-2] for name in reader.quantized if name.startswith(attention)}
    assert of_layer == {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"}
    described = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert f"{attention}.kv_b_proj" in described["modules_to_not_convert"]


def test_models_whose_experts_are_not_stored_so_are_refused(source, tmp_path, capsys):
    assert MXFP4(words(source[0], tmp_path / "out")) == 2
    assert "quant_method 'mxfp4' is not supported (wanted: that of gpt_oss alone" in capsys.readouterr().err
    tiny_family("gpt_oss", tmp_path / "odd", intermediate_size=40)
    assert MXFP4(words(tmp_path / "odd", tmp_path / "out")) == 2
    said = "model.layers.0.mlp.experts.down_proj: has 40 columns, no multiple of a group of 32"
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


class Failing:
    def specs(self, name, spec):
        return {f"{name}_new": spec}

    def convert(self, name, tensor):
        raise ValueError("cannot be converted")

    def config(self, config, names):
        return config


def test_nothing_is_under_the_name_before_all_of_it_is_there(source, tmp_path):
    with pytest.raises(ValueError, match="cannot be converted"):
        rewrite(source[0], tmp_path / "out", Failing())
    assert not (tmp_path / "out").exists()
    assert FP8(words(source[0], tmp_path / "out")) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_disk_without_room_is_told_before_anything_is_written(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tools.rewrite_checkpoint.shutil.disk_usage", lambda path: type("", (), {"free": 10}))
    assert FP8(words(source[0], tmp_path / "out")) == 2
    assert "10 bytes are free (wanted: " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("convert", "more", "said"),
    [
        (FP8, ["--block-size", "0", "128"], "error: --block-size 0: wanted: 1 or more"),
        (FP8, ["--max-workers", "0"], "error: --max-workers 0: wanted: 1 or more"),
        (
            FP8,
            ["--strategy", "tensor", "--scale-fmt", "ue8m0"],
            "error: --scale-fmt ue8m0: wanted: --strategy block",
        ),
        (INT4, ["--group-size", "12"], "error: --group-size 12: wanted: a multiple of 8"),
        (INT4, ["--is-symmetric", "False"], "error: --is-symmetric False: not supported"),
        (INT4, ["--ignore-rules", "re:("], "error: --ignore-rules re:(: no regular expression"),
        (MXFP4, ["--max-workers", "0"], "error: --max-workers 0: wanted: 1 or more"),
        (MXFP8, ["--max-workers", "0"], "error: --max-workers 0: wanted: 1 or more"),
    ],
)
def test_bad_flags_are_one_line(source, tmp_path, convert, more, said, capsys):
    assert convert(words(source[0], tmp_path / "out", *more)) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(said) and printed.count("\n") == 1


@pytest.mark.parametrize("convert", [FP8, INT4])
def test_bad_directories_are_one_line(source, tmp_path, convert, capsys):
    out = tmp_path / "out"
    assert convert(words(source[0], out)) == 0
    assert convert(words(source[0], out)) == 2
    assert f"error: {out}: is there and not empty" in capsys.readouterr().err
    assert convert(words(out, tmp_path / "twice")) == 2
    assert f"error: {out}: is quantised already" in capsys.readouterr().err
    assert convert(words(Path("/none"), tmp_path / "x")) == 2
    assert "error: /none/config.json: not found" in capsys.readouterr().err


def test_a_model_of_which_nothing_would_be_converted_is_refused(tmp_path, capsys):
    """As a dense one by the rules that are for experts: the copy would be called quantised, and is not."""
    tiny_family("glm4", tmp_path / "source")
    assert INT4(words(tmp_path / "source", tmp_path / "out")) == 2
    assert f"error: {tmp_path / 'source'}: has no tensor that would be converted" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_experts_that_cannot_be_taken_apart_are_refused(tmp_path, capsys):
    """The copy would be called quantised, and most of it is not."""
    tiny_family("gpt_oss", tmp_path / "source")
    assert FP8(words(tmp_path / "source", tmp_path / "out")) == 2
    said = capsys.readouterr().err
    assert "model.layers.0.mlp.experts.down_proj [" in said and "] would stay as it is" in said
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_file_that_cannot_be_written_is_named(source, tmp_path, capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        assert FP8(words(source[0], tmp_path / "out")) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"File too large: '{tmp_path}/.out.partial/part" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert FP8(words(source[0], tmp_path / "out")) == 0


def test_a_number_that_is_not_finite_is_named(tmp_path, capsys):
    tiny_family("mixtral", tmp_path / "source")
    file = tmp_path / "source" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name][0, 0] = float("nan")
    save_file(tensors, file)
    assert FP8(words(tmp_path / "source", tmp_path / "out")) == 2
    assert f"{name}: has numbers that are not finite" in capsys.readouterr().err
