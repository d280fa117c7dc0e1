"""The exported directory is a checkpoint that ``transformers`` loads."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime.config.run import run_config
from tests.families import kept_tensors, stored_tensors, tiny_family
from tests.megatron_harness import make_args, run_ranks, save_tiny_hf, tiny_hf_model


def _export(rank, args, target, shard_bytes):
    from slime.backends.megatron_utils.hf_weights import HfWeights, load_hf_weights
    from slime.backends.megatron_utils.initialize import init
    from slime.backends.megatron_utils.model_provider import get_model
    from slime.training.hf_export import ExportBase, save_hf_model_to_path

    init(run_config(args))
    model = get_model(run_config(args))
    load_hf_weights(args, model, args.hf_checkpoint)
    save_hf_model_to_path(ExportBase.of(run_config(args)), target, HfWeights(args, model), shard_bytes)


def _check(exported, expected):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(exported)
    assert model.dtype == torch.float32
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize("layout", ["tensor_model_parallel_size", "pipeline_model_parallel_size"])
def test_a_sharded_export_is_loaded_by_transformers(tmp_path, layout):
    path = save_tiny_hf(tmp_path / "in", "qwen3")
    run_ranks(_export, 2, make_args(path, **{layout: 2}), str(tmp_path / "out"), 100_000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    _check(tmp_path / "out", tiny_hf_model("qwen3"))


def test_an_export_replaces_an_older_one_and_keeps_assets(tmp_path):
    path = save_tiny_hf(tmp_path / "in", "llama")
    (tmp_path / "in/tokenizer.json").write_text("{}")
    out = tmp_path / "out"
    run_ranks(_export, 1, make_args(path), str(out), 100_000)
    run_ranks(_export, 1, make_args(path), str(out), 10**9)
    assert [file.name for file in out.glob("*.safetensors*")] == ["model.safetensors"]
    assert (out / "tokenizer.json").read_text() == "{}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]
    _check(out, tiny_hf_model("llama"))


def test_the_dtype_in_the_config_is_that_of_the_export(tmp_path):
    path = save_tiny_hf(tmp_path / "in", "qwen2")
    args = make_args(path, params_dtype=torch.bfloat16, bf16=True)
    run_ranks(_export, 1, args, str(tmp_path / "out"), 10**9)
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_the_source_checkpoint_is_never_overwritten(tmp_path):
    path = save_tiny_hf(tmp_path, "llama")
    before = Path(path, "model.safetensors").read_bytes()
    with pytest.raises(RuntimeError, match="is --hf-checkpoint itself"):
        run_ranks(_export, 1, make_args(path), path + "/.", 10**9)
    assert Path(path, "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3"])
def test_what_is_not_trained_is_carried_over_as_it_is(tmp_path, family):
    model = tiny_family(family, tmp_path / "in")
    trained, kept = stored_tensors(family, tmp_path / "in"), kept_tensors(family, tmp_path / "in")
    assert kept
    args = make_args(tmp_path / "in", params_dtype=torch.bfloat16, bf16=True)
    run_ranks(_export, 1, args, str(tmp_path / "out"), 10_000)
    found = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(file)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == found.keys() == {*trained, *kept}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in trained.items())
    for name, tensor in kept.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    loaded = type(model).from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=0.01, atol=0)
