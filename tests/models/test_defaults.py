"""What families take for a field that config.json has not is what ``transformers`` takes for it."""

import copy
import json

import pytest
import torch
import transformers

from slime.models import FAMILIES, HfConfigError
from slime.models.hf_config import HfConfig
from slime.models.shape import trained_shape
from tests.families import ALL, WITH_IMAGES, model_type, tiny_config

# What a config class of ``transformers`` may not have, though files do: other names for the same thing, and
# what its model always does in one way. That ours is the same the logits of checkpoints without them show.
OF_FILES_ALONE = {
    *("text_config", "rope_theta", "rope_scaling", "partial_rotary_factor", "num_experts", "head_dim"),
    *("attention_bias", "mlp_bias", "hidden_act", "use_sliding_window", "sliding_window_pattern"),
    *("full_attention_interval", "intermediate_size", "norm_topk_prob", "scoring_func", "topk_method"),
    *("moe_layer_freq", "mlp_layer_types", "rope_interleave", "indexer_rope_interleave"),
    *("qk_norm_type", "use_qk_norm", "use_routing_bias", "shared_intermediate_size"),
}


def values_of(config):
    return json.loads(json.dumps(config.to_dict()))


def shape_of(name, values):
    config = HfConfig(values)
    return trained_shape(FAMILIES[model_type(name)].shape(config), config.text)


def fields_of(values, nested=("text_config", "rope_parameters", "full_attention", "sliding_attention")):
    """Paths of all fields."""
    for key, value in values.items():
        yield (key,)
        if key in nested and isinstance(value, dict):
            yield from ((key, *rest) for rest in fields_of(value, nested))


def without(values, path):
    values = copy.deepcopy(values)
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return values


def held_against_transformers(name, config, values, path):
    """What is wrong, if something is."""
    lacking = without(values, path)
    try:
        found = shape_of(name, lacking)
    except HfConfigError as error:
        return None if path[-1] in str(error) or path[-1] == "rope_type" else str(error)
    try:
        full = values_of(type(config).from_dict(copy.deepcopy(lacking)))
        if "text_config" in full:  # of the two that of the whole model counts
            full["text_config"]["tie_word_embeddings"] = full["tie_word_embeddings"]
        wanted = shape_of(name, full | {"model_type": lacking.get("model_type")})
    except Exception as error:
        return f"transformers has none: {error!r:.300}"
    other = {key: (found[key], wanted[key]) for key in wanted if found[key] != wanted[key]}
    return f"(ours, theirs): {other}" if other else None


@pytest.mark.parametrize("name", ALL)
def test_a_missing_field_is_what_transformers_takes_for_it(name):
    config = tiny_config(name)
    values = values_of(config)
    shape_of(name, values)
    wrong = {}
    for path in fields_of(values):
        if name in WITH_IMAGES and path[1:] not in ((), ("tie_word_embeddings",)):
            continue  # the language model has a row of its own
        if said := held_against_transformers(name, config, values, path):
            wrong[".".join(path)] = said
    assert not wrong, "\n".join(f"{path}: {said}" for path, said in wrong.items())


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_read_that_was_not_held_against_transformers(name, monkeypatch):
    """But for what published files have and their classes in ``transformers`` have not."""
    values, read = values_of(tiny_config(name)), set()
    get = HfConfig.get

    def watched(self, field, default=None):
        read.add(field)
        return get(self, field, default)

    monkeypatch.setattr(HfConfig, "get", watched)
    shape_of(name, values)
    assert "rms_norm_eps" in read
    there = {key for path in fields_of(values) for key in path}
    assert read - there - OF_FILES_ALONE == set()


@pytest.mark.parametrize("name", ["llama-linear", "qwen2", "qwen2_moe", "qwen3_moe", "glm4_moe", "mixtral"])
def test_heads_are_as_wide_as_those_of_transformers(name):
    """Of models whose classes leave that to them."""
    values = values_of(tiny_config(name))
    values.pop("head_dim", None)
    lacking = type(tiny_config(name)).from_dict(copy.deepcopy(values))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(lacking)
    width = model.get_submodule("model.layers.0.self_attn").head_dim
    assert shape_of(name, values)["kv_channels"] == width != 128
