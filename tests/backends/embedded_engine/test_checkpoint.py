"""Weights that an engine starts with, and those that it reads later."""

import os
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from slime.backends.embedded_engine.checkpoint import TornWeights, load_checkpoint, load_random
from slime.backends.embedded_engine.model_config import ModelConfig
from slime.backends.embedded_engine.parameters import Parameters
from slime.models.checkpoint.weights_dir import WeightsReader
from tests.engines.embedded import make_checkpoint


def test_random_weights_follow_from_their_seed_and_norms_are_one():
    def load(seed: int) -> dict[str, torch.Tensor]:
        named = {
            "a.weight": torch.zeros(200, 300),
            "b.weight": torch.zeros(300),
            "norm.weight": torch.zeros(5),
        }
        load_random(SimpleNamespace(named=named), seed)
        return named

    first, same, other = load(3), load(3), load(4)
    assert all(torch.equal(first[name], same[name]) for name in first)
    for name in ("a.weight", "b.weight"):
        assert not torch.equal(first[name], other[name])
        assert 0.018 < float(first[name].std()) < 0.022
    assert torch.equal(first["norm.weight"], torch.ones(5))


@pytest.fixture
def checkpoint(tmp_path):
    """A directory with a checkpoint, and its tensors."""
    make_checkpoint(tmp_path, "qwen3")
    return tmp_path, load_file(tmp_path / "model.safetensors")


def parameters_of(path):
    parameters = Parameters(ModelConfig.from_directory(path))
    parameters.flat.fill_(7.0)
    return parameters


def test_weights_lie_in_the_order_in_which_megatron_core_gives_them(tmp_path):
    """Without a gap where their sizes are multiples of 64 bytes."""
    config = Qwen3Config(
        **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False},
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    attention = [f"self_attn.{name}" for name in ("o_proj", "q_proj", "k_proj", "v_proj", "q_norm", "k_norm")]
    mlp = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    layer = ["input_layernorm", *attention, "post_attention_layernorm", *mlp]
    order = [f"model.layers.{number}.{name}" for number in range(2) for name in layer]
    named, end = Parameters(ModelConfig.from_directory(tmp_path)).named, 0
    for name in ("model.embed_tokens", *order, "model.norm", "lm_head"):
        place = named[f"{name}.weight"]
        assert place.storage_offset() == end, name
        end += place.numel()
    assert len(named) == 3 + len(order)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as it is", "of another format"])
def test_a_checkpoint_is_read_into_the_weights(checkpoint, dtype):
    path, tensors = checkpoint
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    save_file(tensors, path / "model.safetensors")
    parameters = parameters_of(path)
    place = parameters.flat.data_ptr()
    load_checkpoint(parameters, path)
    assert parameters.named.keys() == tensors.keys() and parameters.flat.data_ptr() == place
    assert all(torch.equal(parameters.named[name], tensor.float()) for name, tensor in tensors.items())


def cut(path, tensors):
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[:-1])


def without(path, tensors):
    del tensors["model.norm.weight"]
    save_file(tensors, path / "model.safetensors")


def with_another(path, tensors):
    save_file({**tensors, "model.other": torch.ones(1)}, path / "model.safetensors")


def of_another_shape(path, tensors):
    save_file({**tensors, "model.norm.weight": torch.ones(3)}, path / "model.safetensors")


def of_whole_numbers(path, tensors):
    norm = tensors["model.norm.weight"].int()
    save_file({**tensors, "model.norm.weight": norm}, path / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "not a readable safetensors file"),
        (without, r"1 weights are missing, e.g. model\.norm\.weight"),
        (with_another, "weight 'model.other': this qwen3 model has none of that name"),
        (of_another_shape, r"weight 'model.norm.weight': shape \[3\]"),
        (of_whole_numbers, r"weight 'model.norm.weight': torch.int32 \(wanted: a floating point dtype"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(checkpoint, damage, message):
    path, tensors = checkpoint
    parameters = parameters_of(path)
    damage(path, tensors)
    with pytest.raises(ValueError, match=message) as refused:
        load_checkpoint(parameters, path)
    assert not isinstance(refused.value, TornWeights)
    assert (parameters.flat == 7.0).all()


def test_a_checkpoint_that_breaks_off_while_it_is_read_is_told_apart(checkpoint, monkeypatch):
    path, _ = checkpoint
    parameters, reading = parameters_of(path), WeightsReader.copy_rows

    def cut_before_the_norm(reader, target, name, *rest):
        if name == "model.norm.weight":
            os.truncate(path / "model.safetensors", 100)
        reading(reader, target, name, *rest)

    monkeypatch.setattr(WeightsReader, "copy_rows", cut_before_the_norm)
    with pytest.raises(TornWeights, match=r"model\.safetensors: ends before byte"):
        load_checkpoint(parameters, path)
