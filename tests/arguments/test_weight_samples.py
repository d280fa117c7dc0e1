"""Checkpoints whose headers, or a few of whose values, show that no run can use them."""

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slime.models import shape_from_hf_config
from slime.models.weight_samples import bad_weights, read_headers, wanted_shapes
from tests.each import hold_each
from tests.families import ALL, WITH_IMAGES, tiny_family

ABSENT = {"num_experts": 0, "attention_output_gate": False}

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
    assert bad_weights(tmp_path, None, quantized=True) is None
    assert "a.weight is F8_E4M3 without a scale" in str(bad_weights(tmp_path, None, quantized=False))
    save_file({"a.weight": weight}, tmp_path / "model.safetensors")
    assert "a.weight is F8_E4M3 without a scale" in str(bad_weights(tmp_path, None, quantized=True))


def test_few_values_are_read_of_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of each file at least, however many there are."""
    monkeypatch.setattr("slime.models.weight_samples._READS", 2)
    for number in range(3):
        tensors = {f"{number}.{n}": torch.zeros(4) for n in range(6)}
        save_file(tensors, tmp_path / f"{number}.safetensors")
    assert bad_weights(tmp_path, None, quantized=False) is None
    save_file({"2.0": torch.full((4,), torch.nan)}, tmp_path / "2.safetensors")
    assert "2.safetensors: 2.0 holds NaN" in str(bad_weights(tmp_path, None, quantized=False))


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
    said = refusal(words(hf_checkpoint=altered_checkpoint(auto_map="x"), trust_remote_code=True))
    assert "auto_map is 'x' (wanted: a mapping" in said
    assert json.loads((unknown / "config.json").read_text())["auto_map"]


@pytest.mark.nightly
def test_the_shapes_are_those_of_every_family(tmp_path: Path) -> None:
    def check(name: str) -> None:
        path = tmp_path / name
        tiny_family(name, path)
        shape = shape_from_hf_config(path)
        args = Namespace(**{**ABSENT, **shape}, padded_vocab_size=shape["vocab_size"])
        # Language models in larger ones have a prefix before the names of their tensors.
        assert wanted_shapes(args, read_headers(path)) or name in WITH_IMAGES
        reason = bad_weights(path, args, quantized=False)
        assert reason is None, reason

    hold_each(ALL, check, least=20)
