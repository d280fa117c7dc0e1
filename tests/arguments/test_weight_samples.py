"""Checkpoints whose headers, or a few of whose values, show that no run can use them."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.models import family_of, read_shape, shape_from_hf_config
from slime.models.checkpoint.inspection import (
    _has_infinite,
    bad_headers,
    bad_weights,
    read_headers,
    weight_names,
)
from slime.models.checkpoint.quantization import Quantization, read_quantization
from slime.models.checkpoint.tensor_shapes import TensorShapes
from slime.models.hf_config import HfConfig
from tests.each import hold_each
from tests.families import ALL, chat_family, tiny_family
from tests.run_args import shape_with
from tools.convert_hf_to_fp8 import main as to_fp8
from tools.convert_hf_to_int4 import main as to_int4
from tools.convert_hf_to_mxfp4 import main as to_mxfp4
from tools.convert_hf_to_mxfp8 import main as to_mxfp8

FP8 = Quantization("fp8")
NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def changed(altered_checkpoint) -> Callable[..., Path]:
    """A checkpoint of zeros with one tensor changed, and other values in its config.json."""

    def change(make: Callable[[torch.Tensor], torch.Tensor], name: str = NAME, **values: object) -> Path:
        path = altered_checkpoint(**values)
        tensors = {
            tensor.name: torch.zeros(tensor.shape, dtype=torch.float32)
            for tensor in read_headers(path).values()
        }
        tensors[name] = make(tensors[name]).contiguous()
        save_file(tensors, path / "model.safetensors")
        return path

    return change


def _with_one(value: float, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    def make(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(dtype)
        tensor.view(-1)[11] = value
        return tensor

    return make


BAD = {
    "transposed": (lambda tensor: tensor.T, "has shape ["),
    "int8": (
        lambda tensor: tensor.to(torch.int8),
        "is I8 (wanted: BF16, F16, F32, F64, or quantization_config",
    ),
    "fp8": (
        lambda tensor: tensor.to(torch.float8_e4m3fn),
        "is F8_E4M3 without a scale (wanted: quantization_",
    ),
    **{
        f"{value} {dtype}": (_with_one(value, dtype), "holds NaN or infinite values (wanted: finite weights)")
        for value in (float("nan"), float("inf"), float("-inf"))
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    },
}


def test_weights_that_no_run_can_use_are_named_by_file_and_tensor(changed, words, refusal) -> None:
    def check(case: str) -> None:
        make, said = BAD[case]
        path = changed(make)
        text = refusal(words(hf_checkpoint=path))
        assert text.startswith(f"--hf-checkpoint: {path}/model.safetensors: {NAME} {said}"), text

    hold_each(BAD, check)


def test_weights_of_further_models_are_looked_at(changed, words, refusal, notes, tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    group = {"server_groups": [{"worker_type": "regular", "num_gpus": 1}]}
    line = words(colocate=None, rollout_num_gpus=2, sglang_config=fleet)

    def name_judge(path: Path) -> None:
        judge = {"name": "judge", "model_path": str(path), "update_weights": False}
        fleet.write_text(json.dumps({"sglang": [{"name": "policy"} | group, judge | group]}))

    def check(case: str) -> None:
        make, said = BAD[case]
        path = changed(make)
        name_judge(path)
        text = refusal(line)
        where = f"--sglang-config: model judge: model_path {path}: {path}/model.safetensors"
        assert text.startswith(f"{where}: {NAME} {said}"), text

    hold_each(("transposed", "int8", "fp8", "nan torch.bfloat16"), check)
    broken = changed(torch.clone)
    name_judge(broken)
    assert notes(line) == []
    (broken / "model.safetensors").write_bytes(b"x")
    assert refusal(line).startswith(f"--sglang-config: model judge: model_path {broken}: ")


def test_every_format_of_floats_is_taken_with_its_largest_and_smallest_numbers(changed, words, notes) -> None:
    def check(dtype: torch.dtype) -> None:
        info = torch.finfo(dtype)
        edges = torch.tensor([info.max, info.min, info.tiny, info.smallest_normal, -0.0], dtype=torch.float64)

        def fill(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.to(dtype)
            tensor.view(-1)[:5] = edges.to(dtype)
            return tensor

        assert notes(words(hf_checkpoint=changed(fill))) == []

    hold_each([torch.float64, torch.float32, torch.bfloat16, torch.float16], check)


def test_shapes_follow_from_config_json(altered_checkpoint, words, refusal) -> None:
    said = refusal(words(hf_checkpoint=altered_checkpoint(hidden_size=63)))
    assert "model.embed_tokens.weight has shape [" in said and ", 63])" in said


def test_eight_bits_need_a_scale_each_and_word_of_it(tmp_path: Path) -> None:
    weight = torch.zeros(4, 4).to(torch.float8_e4m3fn)
    save_file({"a.weight": weight, "a.weight_scale_inv": torch.ones(1)}, tmp_path / "model.safetensors")
    assert bad_weights(tmp_path, None, FP8) is None
    assert "a.weight is F8_E4M3 without a scale" in str(bad_weights(tmp_path, None, None))
    save_file({"a.weight": weight}, tmp_path / "model.safetensors")
    assert "a.weight is F8_E4M3 without a scale" in str(bad_weights(tmp_path, None, FP8))


def test_few_values_are_read_of_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of each file at least, however many there are."""
    monkeypatch.setattr("slime.models.checkpoint.inspection._READS", 2)
    for number in range(3):
        tensors = {f"{number}.{n}": torch.zeros(4) for n in range(6)}
        save_file(tensors, tmp_path / f"{number}.safetensors")
    assert bad_weights(tmp_path, None, None) is None
    save_file({"2.0": torch.full((4,), torch.nan)}, tmp_path / "2.safetensors")
    assert "2.safetensors: 2.0 holds NaN" in str(bad_weights(tmp_path, None, None))


def test_config_json_is_read_as_a_whole(altered_checkpoint, words, refusal, notes) -> None:
    assert "rope_theta is 'x' (wanted: a number above 0)" in refusal(
        words(hf_checkpoint=altered_checkpoint(rope_theta="x"))
    )
    unknown = altered_checkpoint(auto_map={"AutoModelForCausalLM": "nowhere.Model"})
    assert notes(words(hf_checkpoint=unknown)) == []
    said = refusal(words(hf_checkpoint=unknown, trust_remote_code=True))
    assert (
        "auto_map says 'nowhere.Model' for AutoModelForCausalLM (wanted: module.Class, and module.py" in said
    )
    for wrong, message in (("x", "is 'x' (wanted: a mapping"), ({"AutoConfig": 7}, "says 7 for AutoConfig")):
        for trusted in (None, True):
            line = words(hf_checkpoint=altered_checkpoint(auto_map=wrong), trust_remote_code=trusted)
            assert f"auto_map {message}" in refusal(line)
    assert json.loads((unknown / "config.json").read_text())["auto_map"]


def test_a_model_type_that_only_its_own_code_knows_asks_for_the_flag(
    altered_checkpoint, words, refusal
) -> None:
    path = altered_checkpoint(model_type="mine", auto_map={"AutoConfig": "code_of_mine.Config"})
    said = refusal(words(hf_checkpoint=path, train_backend="fsdp"))
    assert "model_type 'mine' is known by the checkpoint's own code 'code_of_mine.Config' alone" in said
    assert said.endswith("(wanted: --trust-remote-code, which runs it)")


@pytest.mark.slow
def test_the_shape_of_every_tensor_of_every_family_is_known(tmp_path: Path) -> None:
    """Against the checkpoints that ``transformers`` writes."""

    def check(name: str) -> None:
        path = tmp_path / name
        tiny_family(name, path)
        flags = shape_with(**shape_from_hf_config(path), padded_vocab_size=256)
        of, headers = TensorShapes(read_shape(path)).of, read_headers(path)
        for tensor in family_of(flags.model_type).weights.hf_names(flags):
            assert of(tensor) == headers[tensor].shape, tensor
        reason = bad_weights(path, read_shape(path), None)
        assert reason is None, reason

    hold_each(ALL, check, least=20)


OF_FAMILIES = {
    "deepseek_v32": (
        "self_attn.kv_b_proj.weight",
        "self_attn.indexer.wq_b.weight",
        "mlp.experts.5.up_proj.weight",
    ),
    "qwen3_next": (
        "linear_attn.in_proj_qkvz.weight",
        "linear_attn.conv1d.weight",
        "mlp.shared_expert_gate.weight",
    ),
    "gpt_oss": ("mlp.experts.gate_up_proj", "mlp.router.weight"),
    "minimax_m2": ("block_sparse_moe.experts.0.w1.weight", "block_sparse_moe.gate.weight"),
}
"""Samples of latent, sparse and linear attention and of experts, alone and stacked."""


@pytest.mark.slow
def test_transposed_tensors_of_every_kind_of_layer_are_named(
    tmp_path: Path, words, refusal, notes, capsys
) -> None:
    def check(name: str) -> None:
        path = tmp_path / name
        chat_family(name, path)
        capsys.readouterr()
        notes(words(hf_checkpoint=path))
        for part in OF_FAMILIES[name]:
            with _transposed(path, f"model.layers.2.{part}"):
                said = refusal(words(hf_checkpoint=path))
            assert f"model.layers.2.{part} has shape [" in said, said

    hold_each(OF_FAMILIES, check)


@contextmanager
def _transposed(path: Path, name: str) -> Iterator[None]:
    file = path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name].movedim(0, -1).contiguous()}, file)
    yield
    save_file(tensors, file)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Mixtures of experts in each of the quantised forms."""
    root = tmp_path_factory.mktemp("quantized")
    tiny_family("qwen2_moe", root / "plain")
    words = ["--model-dir", str(root / "plain"), "--save-dir"]
    assert to_fp8([*words, str(root / "fp8"), "--block-size", "32", "24"]) == 0
    assert to_int4([*words, str(root / "int4"), "--group-size", "16"]) == 0
    tiny_family("gpt_oss", root / "sinks", num_hidden_layers=2)
    assert to_mxfp4(["--model-dir", str(root / "sinks"), "--save-dir", str(root / "mxfp4")]) == 0
    tiny_family("qwen2_moe", root / "wide", moe_intermediate_size=64, shared_expert_intermediate_size=96)
    assert to_mxfp8(["--model-dir", str(root / "wide"), "--save-dir", str(root / "mxfp8")]) == 0
    return {kind: root / kind for kind in ("fp8", "int4", "mxfp4", "mxfp8")}


def test_each_tensor_of_a_quantised_checkpoint_has_one_shape_and_format(quantized) -> None:
    """One tensor after the other gets a row more, and another format, in the headers."""

    def check(kind: str) -> None:
        path = quantized[kind]
        config = HfConfig.read(path)
        facts = read_shape(path), read_quantization(config)
        assert bad_weights(path, *facts) is None
        headers = read_headers(path)
        for name, tensor in headers.items():
            longer = (tensor.shape[0] + 1, *tensor.shape[1:])
            for changed in (replace(tensor, dtype="I8"), replace(tensor, shape=longer)):
                said = bad_headers({**headers, name: changed}, *facts)
                assert name in str(said), changed

    hold_each(quantized, check)


def _poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """Puts a NaN into a tensor: of float8, or of the powers of two in which MXFP4 and MXFP8 have scales."""
    codes = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7D, torch.uint8: 0xFF}
    changed = tensor.clone()
    if tensor.dtype in codes:
        changed.view(torch.uint8).view(-1)[0] = codes[tensor.dtype]
    else:
        changed.view(-1)[0] = torch.nan
    return changed


def test_codes_and_scales_that_are_no_numbers_are_named(quantized, tmp_path: Path) -> None:
    ends = {"fp8": ("up_proj.weight", "up_proj.weight_scale_inv"), "int4": ("up_proj.weight_scale",)}
    ends |= {"mxfp4": ("down_proj_scales",), "mxfp8": ends["fp8"]}

    def check(kind: str) -> None:
        tensors = load_file(quantized[kind] / "model.safetensors")
        for end in ends[kind]:
            name = next(name for name in tensors if name.endswith(end))
            save_file(tensors | {name: _poisoned(tensors[name])}, tmp_path / "model.safetensors")
            quantization = read_quantization(HfConfig.read(quantized[kind]))
            said = bad_weights(tmp_path, read_shape(quantized[kind]), quantization)
            assert f"{name} holds NaN or infinite values" in str(said)

    hold_each(quantized, check)


def test_names_of_weights_that_are_stored_in_an_unknown_way_are_not_guessed(altered_checkpoint) -> None:
    with pytest.raises(ValueError, match="quant_method 'gguf'"):
        weight_names(altered_checkpoint(quantization_config={"quant_method": "gguf"}))


def test_the_codes_of_eight_bits_that_are_no_numbers_are_known() -> None:
    ends = {"F8_E4M3": {0x7F}, "F8_E5M2": {0x7C, 0x7D, 0x7E, 0x7F}}
    wanted = {kind: codes | {code + 0x80 for code in codes} for kind, codes in ends.items()}
    wanted["F8_E8M0"] = {0xFF}
    found = {kind: {code for code in range(256) if _has_infinite(bytes([code]), kind)} for kind in wanted}
    assert found == wanted
