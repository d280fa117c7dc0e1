"""Language models inside larger checkpoints: what is read of nested configs, and which tensors are whose."""

import json

import pytest
import torch
from safetensors.torch import save_file

from slime.models import FAMILIES, HfConfigError, read_shape, shape_from_hf_config
from slime.models.checkpoint.passthrough import passthrough_names
from slime.models.checkpoint.safetensors_dir import SafetensorReader
from slime.models.family import nested_family
from slime.models.hf_config import HfConfig, read_stop_ids
from slime.models.weight_prefix import WeightPrefix
from tests.families import WITH_IMAGES, save_tiny_config
from tests.models.public_configs import CONFIGS
from tests.run_args import shape_with


def write(path, config):
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_the_shape_is_that_of_the_language_model(name, tmp_path):
    whole = vars(read_shape(save_tiny_config(name, tmp_path / "whole")))
    text = vars(read_shape(save_tiny_config(WITH_IMAGES[name][1], tmp_path / "text")))
    assert whole == text | {"model_type": name}


def test_gemmas_published_config_leaves_out_what_is_the_default(tmp_path):
    shape = shape_from_hf_config(write(tmp_path, CONFIGS["gemma3-4B"]))
    assert (shape["num_attention_heads"], shape["num_query_groups"], shape["kv_channels"]) == (8, 4, 256)
    assert shape["vocab_size"] == 262208 and not shape["untie_embeddings_and_output_weights"]
    assert shape["rope"].base == 1e6 and shape["rope"].factor("factor") == 8.0
    assert shape["local_rope"].base == 1e4 and shape["attention_windows"][:6] == (1024,) * 5 + (None,)


@pytest.mark.parametrize(
    ("outer", "inner", "untied"),
    [(True, None, False), (None, True, False), (None, None, True), (True, True, False)],
)
def test_tied_embeddings_are_said_outside_or_inside(outer, inner, untied, tmp_path):
    config = json.loads(json.dumps(CONFIGS["qwen3.5-4B"]))
    config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"] = outer, inner
    assert read_shape(write(tmp_path, config)).untie_embeddings_and_output_weights == untied


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"text_config": None}, "config.json: text_config is None"),
        ({"text_config": [1]}, "config.json: text_config is .* .wanted: a mapping"),
        ({"tie_word_embeddings": True}, "text_config: tie_word_embeddings is False .wanted: True"),
        ({"hidden_size": None}, "config.json: text_config: hidden_size: missing"),
        ({"attention_dropout": 0.5}, "config.json: text_config: attention_dropout 0.5"),
    ],
)
def test_what_is_wrong_with_it_is_named(change, complaint, tmp_path):
    config = json.loads(json.dumps(CONFIGS["qwen3.5-27B"]))
    for name, value in change.items():
        (config if name in config else config["text_config"])[name] = value
    with pytest.raises(HfConfigError, match=complaint):
        shape_from_hf_config(write(tmp_path, config))


def test_stop_ids_and_format_may_be_said_inside(tmp_path):
    write(tmp_path, CONFIGS["qwen3.5-27B"])
    assert read_stop_ids(tmp_path) == {248044}
    assert HfConfig.read(tmp_path).dtype == "bfloat16"
    write(tmp_path, CONFIGS["qwen3.5-27B"] | {"eos_token_id": 7, "dtype": "float32"})
    assert read_stop_ids(tmp_path) == {7}
    assert HfConfig.read(tmp_path).dtype == "float32"


@pytest.mark.parametrize(
    ("family", "own", "kept"),
    [
        ("qwen3_5", "model.language_model.layers.3.mlp.up_proj.weight", "model.visual.blocks.3.mlp.bias"),
        (
            "qwen3_5_moe",
            "model.language_model.layers.0.mlp.experts.down_proj",
            "mtp.layers.0.mlp.gate",
        ),
        ("gemma3", "language_model.model.norm.weight", "multi_modal_projector.mm_soft_emb_norm.weight"),
        ("gemma3", "language_model.model.layers.1.mlp.up_proj.weight", "vision_tower.encoder.layers.26.bias"),
    ],
)
def test_names_are_those_of_published_checkpoints(family, own, kept, tmp_path):
    path = save_tiny_config(family, tmp_path)
    shape = shape_from_hf_config(path)
    weights = FAMILIES[family].weights

    assert own in weights.hf_names(shape_with(**shape))
    save_file({name: torch.zeros(1) for name in (own, kept)}, path / "model.safetensors")
    with SafetensorReader(path) as reader:
        assert passthrough_names(path, reader) == [kept]


def test_layers_that_config_json_does_not_count_are_not_kept(tmp_path):
    path = save_tiny_config("deepseek_v3", tmp_path, num_nextn_predict_layers=1)
    names = [f"model.layers.{number}.input_layernorm.weight" for number in (3, 4, 5)]
    save_file({name: torch.zeros(1) for name in names}, path / "model.safetensors")
    with SafetensorReader(path) as reader:
        assert passthrough_names(path, reader) == names[1:2]


def test_a_model_that_only_another_trainer_computes_has_them_too(tmp_path):
    """The FSDP trainer asks as well: it trains what no family's shape describes."""
    path = save_tiny_config("deepseek_v3", tmp_path, norm_topk_prob=False, num_nextn_predict_layers=1)
    with pytest.raises(HfConfigError, match="norm_topk_prob"):
        read_shape(path)
    save_file({"model.layers.4.enorm.weight": torch.zeros(1)}, path / "model.safetensors")
    with SafetensorReader(path) as reader:
        assert passthrough_names(path, reader) == ["model.layers.4.enorm.weight"]


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_a_place_leads_there_and_back(name):
    place = WeightPrefix("language_model.model.", "language_model.lm_head.")
    assert place.outer(name) == f"language_model.{name}"
    assert place.inner(place.outer(name)) == name


def test_layers_behind_the_last_one_are_kept_within_a_larger_checkpoint(tmp_path, monkeypatch):
    nested = nested_family(FAMILIES["deepseek_v3"], WeightPrefix("text.model."), ("tower.",))
    monkeypatch.setitem(FAMILIES, "nested", nested)
    text = json.loads(save_tiny_config("deepseek_v3", tmp_path).joinpath("config.json").read_text())
    write(tmp_path, {"model_type": "nested", "text_config": text | {"num_nextn_predict_layers": 1}})
    names = ["tower.bias", *(f"text.model.layers.{number}.enorm.weight" for number in (3, 4, 5))]
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    with SafetensorReader(tmp_path) as reader:
        assert sorted(passthrough_names(tmp_path, reader)) == [names[2], names[0]]


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({}, None),
        ({"torch_dtype": "float16"}, "float16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": "float32", "text_config": {"dtype": "bfloat16"}}, "float32"),
        ({"dtype": None, "text_config": None}, None),
    ],
)
def test_the_number_format_is_said_outside_or_inside(config, dtype):
    assert HfConfig(config, "config.json").dtype == dtype


def test_a_size_fits_into_32_bits_with_a_sign():
    config = HfConfig({"most": 2**31 - 1, "more": 2**31}, "config.json")
    assert config.size("most") == 2**31 - 1
    with pytest.raises(HfConfigError, match="more is 2147483648"):
        config.size("more")
