"""A few values of each file are looked at: which, how many, and what is never taken for a number."""

import json

import pytest
import torch
from safetensors.torch import save_file

from slime.models.checkpoint import inspection
from slime.models.checkpoint.inspection import bad_weights, read_headers, weight_names

GOOD = torch.arange(4.0)


def bad(dtype, value):
    return torch.tensor([1.0, 2.0, value, 1.0], dtype=dtype)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_what_is_not_finite_is_named(tmp_path, dtype, value):
    save_file({"a": GOOD, "b": bad(dtype, value)}, tmp_path / "model.safetensors")
    said = f"{tmp_path}/model.safetensors: b holds NaN or infinite values (wanted: finite weights)"
    assert bad_weights(tmp_path, None, None) == said
    save_file({"a": GOOD, "b": bad(dtype, torch.finfo(dtype).max)}, tmp_path / "model.safetensors")
    assert bad_weights(tmp_path, None, None) is None


@pytest.mark.parametrize(
    ("dtype", "name", "byte", "finite"),
    [
        (torch.float8_e4m3fn, "a", 0x7F, False),
        (torch.float8_e4m3fn, "a", 0xFF, False),
        (torch.float8_e4m3fn, "a", 0x7E, True),
        (torch.float8_e5m2, "a", 0x7C, False),
        (torch.float8_e5m2, "a", 0x7B, True),
        (torch.float8_e8m0fnu, "a", 0xFF, False),
        (torch.float8_e8m0fnu, "a", 0xFE, True),
        (torch.uint8, "a_scales", 0xFF, False),
        (torch.uint8, "a_scales", 0xFE, True),
        (torch.uint8, "a_blocks", 0xFF, True),
        (torch.int8, "a", 0x7F, True),
    ],
)
def test_bytes_are_numbers_of_their_format(tmp_path, dtype, name, byte, finite):
    data = torch.tensor([0, byte, 0], dtype=torch.uint8).view(dtype)
    save_file({name: data}, tmp_path / "model.safetensors")
    found = inspection._bad_values(list(read_headers(tmp_path).values()))
    assert (found is None) is finite


FIRST_AND_THIRD, ALL = [0, 2], [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("files", "reads", "seen"),
    [
        *((1, 4, ALL), (1, 3, FIRST_AND_THIRD), (1, 0, FIRST_AND_THIRD)),
        *((2, 8, ALL), (2, 4, FIRST_AND_THIRD), (4, 4, FIRST_AND_THIRD)),
    ],
)
def test_a_number_of_tensors_is_read_of_all_files_together_and_two_of_each(
    tmp_path, monkeypatch, files, reads, seen
):
    monkeypatch.setattr(inspection, "_READS", reads)
    for file in range(files):
        save_file({f"{file}.{at}": GOOD.clone() for at in ALL}, tmp_path / f"model-{file}.safetensors")
    last, found = files - 1, []
    for place in ALL:
        tensors = {f"{last}.{at}": GOOD.clone() for at in ALL}
        tensors[f"{last}.{place}"][1] = torch.nan
        save_file(tensors, tmp_path / f"model-{last}.safetensors")
        found += [place] if bad_weights(tmp_path, None, None) else []
    assert found == seen


def test_the_beginning_of_a_tensor_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(inspection, "_READ_SIZE", 14)  # three numbers and a half
    for place, finite in ((2, False), (3, True)):
        values = torch.ones(8)
        values[place] = torch.nan
        save_file({"a": values}, tmp_path / "model.safetensors")
        assert (bad_weights(tmp_path, None, None) is None) is finite


def test_headers_say_where_tensors_are(tmp_path):
    save_file({"a": GOOD, "b": torch.ones(2, 3).bfloat16()}, tmp_path / "x.safetensors", {"format": "pt"})
    headers = read_headers(tmp_path)
    assert headers.keys() == {"a", "b"}
    found = headers["b"]
    assert (found.name, found.dtype, found.shape) == ("b", "BF16", (2, 3))
    data = found.file.read_bytes()[found.start : found.end]
    assert data == torch.ones(2, 3).bfloat16().view(torch.uint8).numpy().tobytes()


def test_names_are_those_of_the_model(tmp_path):
    """Where config.json says that weights are quantised, scales are none."""
    codes, scale = torch.ones(4, 4).to(torch.float8_e4m3fn), torch.ones(1, 1)
    save_file({"a.weight": codes, "a.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    assert weight_names(tmp_path) == {"a.weight", "a.weight_scale_inv"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert weight_names(tmp_path) == {"a.weight", "a.weight_scale_inv"}
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert weight_names(tmp_path) == {"a.weight"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ValueError, match="quant_method 'gptq' is not supported"):
        weight_names(tmp_path)
