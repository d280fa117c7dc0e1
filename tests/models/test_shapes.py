"""Shapes from config.json: what is read, and what is refused."""

import json

import pytest

from slime.models import HfConfigError, family_of, shape_from_hf_config
from slime.models.hf_config import HfConfig, read_stop_ids
from slime.models.rope import Rope
from slime.models.shape import pad_vocab_size, trained_shape

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}
LLAMA3_ROPE = {
    **{"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}


def shape_from_config_dict(values):
    config = HfConfig(values)
    return trained_shape(family_of(config.get("model_type"), config.origin).shape(config), config)


def test_fields_carry_megatron_names(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert shape_from_hf_config(tmp_path) == {
        "model_type": "llama",
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 8,
        "num_query_groups": 2,
        "kv_channels": 8,
        "norm_epsilon": 1e-5,
        "layernorm_epsilon": 1e-5,
        "vocab_size": 100,
        "max_position_embeddings": 512,
        "untie_embeddings_and_output_weights": True,
        "qk_layernorm": False,
        "add_qkv_bias": False,
        "rotary_base": 5e5,
        "use_rope_scaling": False,
        "rope_scaling_factor": 8.0,
        "rope": Rope(5e5),
        "rope_type": "rope",
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "mscale": 0.0,
        "mscale_all_dim": 0.0,
        "post_self_attn_layernorm": False,
        "post_mlp_layernorm": False,
        "qk_norm_over_heads": False,
        "layernorm_zero_centered_gamma": False,
        "softmax_scale": None,
        "attention_windows": None,
        "local_rope": None,
        "embedding_factor": 1.0,
        "activation": "silu",
        "swiglu": True,
        "multi_latent_attention": False,
        "attention_output_gate": False,
        "add_bias_linear": False,
        "softmax_type": "vanilla",
        "glu_linear_offset": 0.0,
        "activation_func_clamp_value": None,
        "quick_geglu": False,
        **dict.fromkeys(
            f"dsa_indexer_{part}" for part in ("n_heads", "head_dim", "topk", "freq", "interleaved")
        ),
        "linear_attention_freq": None,
        **dict.fromkeys(f"linear_{part}" for part in ("conv_kernel_dim", "key_head_dim", "value_head_dim")),
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads")),
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")),
    }


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"model_type": "qwen3", "head_dim": 16}, "qk_layernorm", True),
        ({"model_type": "qwen3"}, "kv_channels", 128),
        ({"model_type": "qwen2"}, "add_qkv_bias", True),
        ({"tie_word_embeddings": True}, "untie_embeddings_and_output_weights", False),
        ({"num_key_value_heads": None}, "num_query_groups", 8),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, "rotary_base", 7.0),
        ({"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 7.0}}, "rotary_base", 7.0),
        ({"rope_scaling": LLAMA3_ROPE}, "use_rope_scaling", True),
        ({"rope_scaling": LLAMA3_ROPE}, "rope_scaling_factor", 32.0),
        ({"rope_scaling": LLAMA3_ROPE}, "rotary_base", 5e5),
    ],
)
def test_variants(change, field, value):
    assert shape_from_config_dict({**LLAMA, **change})[field] == value


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"model_type": "gpt2"},
            r"model_type 'gpt2' is not supported \(wanted: llama, qwen2, qwen3, qwen3_moe, ",
        ),
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"attention_bias": True}, r"attention_bias True is not supported \(wanted: False\)"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window True"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "RoPE type 'longrope'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "RoPE original_max_position_embeddings: missing"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_what_the_trainer_would_compute_wrongly_is_refused(change, complaint):
    with pytest.raises(HfConfigError, match=f"config.json: {complaint}"):
        shape_from_config_dict({**LLAMA, **change})


@pytest.mark.parametrize("value", ["x", "5", [], {}, 1.5, True, 0, -1, 2**31, float("nan")])
@pytest.mark.parametrize(
    "name",
    [
        *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"),
        *("max_position_embeddings", "num_key_value_heads", "head_dim"),
    ],
)
def test_a_size_is_a_whole_number_above_zero(name, value):
    with pytest.raises(HfConfigError, match=rf"config.json: {name} is .* \(wanted: an integer, 1 to \d+\)"):
        shape_from_config_dict({**LLAMA, name: value})


@pytest.mark.parametrize("value", ["x", "5", [], None, True, 0, -1e-5, float("inf"), float("nan"), 1e39])
@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta"])
def test_a_number_is_finite_and_above_zero(name, value):
    with pytest.raises(HfConfigError, match=rf"config.json: {name} is .* \(wanted: a number above 0\)"):
        shape_from_config_dict({**LLAMA, name: value})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_type": ["qwen3"]}, r"model_type \['qwen3'\] is not supported"),
        ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings is 'yes' \(wanted: true or false\)"),
        ({"mlp_bias": 1.5}, r"mlp_bias is 1.5 \(wanted: true or false\)"),
        ({"rope_scaling": 5}, r"rope_scaling is 5 \(wanted: a mapping\)"),
        ({"rope_parameters": {"rope_theta": "x"}}, r"rope_theta is 'x' \(wanted: a number above 0\)"),
        ({"rope_scaling": {**LLAMA3_ROPE, "factor": "x"}}, r"RoPE factor is 'x' \(wanted: a number above 0"),
        (
            {"num_key_value_heads": 3},
            r"num_key_value_heads is 3 \(wanted: a divisor of num_attention_heads",
        ),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers is 1000000000 \(wanted: an integer, 1 to 100000"),
    ],
)
def test_what_is_no_model_is_refused(change, complaint):
    with pytest.raises(HfConfigError, match=f"config.json: {complaint}"):
        shape_from_config_dict({**LLAMA, **change})


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"config.json": {"eos_token_id": 1}}, {1}),
        ({"config.json": {"eos_token_id": [1, 2]}, "generation_config.json": {"eos_token_id": 3}}, {1, 2, 3}),
        ({"config.json": {}, "generation_config.json": {}}, set()),
    ],
)
def test_stop_ids_come_from_both_files(tmp_path, files, found):
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    assert read_stop_ids(tmp_path) == found


@pytest.mark.parametrize("value", ["x", -1, 1.5, True, [1, None], {"a": 1}])
def test_a_stop_id_is_a_token(tmp_path, value):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(HfConfigError, match=r"generation_config.json: eos_token_id is .* \(wanted: token"):
        read_stop_ids(tmp_path)


@pytest.mark.parametrize(
    ("content", "complaint"), [(None, "not found"), ("{", "not valid JSON"), ("[1]", "holds list")]
)
def test_unreadable_files_are_named(tmp_path, content, complaint):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(HfConfigError, match=rf"{tmp_path}/config.json: {complaint}"):
        shape_from_hf_config(tmp_path)


def test_vocabulary_padding():
    assert pad_vocab_size(100, 128, 1) == 128
    assert pad_vocab_size(256, 64, 4) == 256
    assert pad_vocab_size(257, 64, 4) == 512
