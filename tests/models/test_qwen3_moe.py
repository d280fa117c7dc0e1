"""What is read of the config.json of a mixture of experts, and the names of its weights."""

import pytest
import torch
from safetensors.torch import load_file

from slime.models import HfConfigError, calculate_fwd_flops, family_of, shape_from_hf_config
from slime.models.hf_config import HfConfig
from slime.models.rules import Rule
from slime.models.shape import trained_shape
from tests.megatron_harness import save_tiny_hf
from tests.run_args import shape_with

CONFIG = {
    **{"model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 100, "head_dim": 16},
    **{"max_position_embeddings": 512, "num_experts": 8, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "norm_topk_prob": True},
}


def shape_of(**changes):
    config = HfConfig({**CONFIG, **changes})
    return trained_shape(family_of("qwen3_moe").shape(config), config)


def test_fields_carry_megatron_names():
    shape = shape_of()
    assert (shape["num_experts"], shape["moe_router_topk"], shape["moe_ffn_hidden_size"]) == (8, 2, 32)
    assert shape["moe_layer_freq"] == (1, 1, 1, 1) and shape["moe_router_pre_softmax"] is False
    assert shape["qk_layernorm"] is True and shape["ffn_hidden_size"] == 128


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"norm_topk_prob": False}, "moe_router_pre_softmax", True),
        ({"norm_topk_prob": None}, "moe_router_pre_softmax", True),
        ({"decoder_sparse_step": 2}, "moe_layer_freq", (0, 1, 0, 1)),
        ({"mlp_only_layers": [0, 3]}, "moe_layer_freq", (0, 1, 1, 0)),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, "moe_layer_freq", (0, 0, 0, 1)),
        ({"num_experts": None, "num_local_experts": 4}, "num_experts", 4),
    ],
)
def test_variants(change, field, value):
    assert shape_of(**change)[field] == value


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_experts": None}, "num_experts or num_local_experts: missing"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9 .wanted: an integer, 1 to 8"),
        ({"num_experts_per_tok": 1}, "norm_topk_prob True is not supported"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        ({"decoder_sparse_step": 5}, "decoder_sparse_step is 5 .wanted: at least one layer with experts"),
        ({"decoder_sparse_step": "x"}, "decoder_sparse_step is 'x'"),
        ({"mlp_only_layers": [0, 1, 2, 3]}, "decoder_sparse_step is 1 .wanted: at least one"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers is 'all' .wanted: a list of layers"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'"),
    ],
)
def test_what_is_not_computed_is_refused(change, complaint):
    with pytest.raises(HfConfigError, match=f"config.json: {complaint}"):
        shape_of(**change)


def test_the_names_are_those_that_transformers_writes(tmp_path):
    save_tiny_hf(tmp_path, "qwen3_moe")
    args = shape_with(**shape_from_hf_config(tmp_path))
    assert family_of("qwen3_moe").weights.hf_names(args) == load_file(tmp_path / "model.safetensors").keys()


@pytest.mark.parametrize("name", ["mlp.experts.local_experts.3.linear_fc3.weight", "mlp.experts.linear_fc1"])
def test_an_unknown_parameter_of_an_expert_is_refused(name):
    with pytest.raises(ValueError, match="no Hugging Face counterpart is known"):
        family_of("qwen3_moe").weights.rule_for(f"decoder.layers.0.{name}")


def test_each_expert_has_tensors_of_its_own():
    rule = family_of("qwen3_moe").weights.rule_for(
        "decoder.layers.2.mlp.experts.local_experts.3.linear_fc2.weight"
    )
    assert rule == Rule(("model.layers.2.mlp.experts.3.down_proj.weight",))


def test_gate_and_up_of_an_expert_are_split_and_joined():
    args = shape_with(**shape_of())
    weights = family_of("qwen3_moe").weights
    name = "decoder.layers.2.mlp.experts.local_experts.5.linear_fc1.weight"
    param = torch.arange(6.0).reshape(6, 1)
    rule = weights.rule_for(name)
    assert rule.hf_names == tuple(
        f"model.layers.2.mlp.experts.5.{part}_proj.weight" for part in ("gate", "up")
    )
    assert torch.equal(rule.merge(rule.split(param, args), args), param)


def test_forward_flops_count_only_the_experts_that_a_token_is_sent_to():
    args = shape_with(**shape_of(mlp_only_layers=[0]), padded_vocab_size=100)
    # Per layer: q 64x128, k and v 64x32 each, output 128x64; head 64x100; a product costs 2.
    attention = 64 * 128 + 2 * 64 * 32 + 128 * 64
    dense, experts = 3 * 64 * 128, 64 * 8 + 2 * 3 * 64 * 32
    linear = 2 * (4 * attention + dense + 3 * experts + 64 * 100)
    # Per layer 8 heads of width 16 and 3 causal pairs of 2 tokens: scores and sum.
    assert calculate_fwd_flops([2], args) == 2 * linear + 4 * 2 * 2 * 128 * 3
