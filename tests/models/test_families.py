"""What families read of config.json, and what they refuse by name."""

from dataclasses import replace

import pytest

from slime.models import FAMILIES, HfConfigError, calculate_fwd_flops, family_of
from slime.models.hf_config import HfConfig
from slime.models.shape import trained_shape
from tests.models.public_configs import CONFIGS
from tests.run_args import shape_with


def shape_of(model, **changes):
    config = HfConfig({**CONFIGS[model], **changes})
    return trained_shape(family_of(config.get("model_type")).shape(config), config.text)


@pytest.mark.parametrize(
    ("model", "change", "field", "value"),
    [
        ("glm4-9B", {}, "rotary_percent", 0.5),
        ("glm4-9B", {}, "rotary_interleaved", True),
        ("glm4-9B", {"partial_rotary_factor": None}, "rotary_percent", 0.5),
        ("glm4-9B", {"attention_bias": False}, "add_qkv_bias", False),
        ("glm4.5-106B-A12B", {}, "moe_layer_freq", (0,) + (1,) * 45),
        ("glm4.5-106B-A12B", {"first_k_dense_replace": 0}, "moe_layer_freq", (1,) * 46),
        ("glm4.5-106B-A12B", {"n_shared_experts": 2}, "moe_shared_expert_intermediate_size", 2816),
        ("glm4.7-30B-A3B", {"first_k_dense_replace": None}, "moe_layer_freq", (0,) + (1,) * 46),
        (
            "glm4.7-30B-A3B",
            {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 44},
            "moe_layer_freq",
            (0,) * 3 + (1,) * 44,
        ),
        ("deepseek-v3", {}, "rope_type", "yarn"),
        ("deepseek-v3", {}, "q_lora_rank", 1536),
        ("deepseek-v3", {"first_k_dense_replace": None}, "moe_layer_freq", (0,) * 3 + (1,) * 58),
        ("deepseek-v3.2", {"first_k_dense_replace": None}, "moe_layer_freq", (0,) * 3 + (1,) * 58),
        ("glm5-744B-A40B", {"first_k_dense_replace": None}, "moe_layer_freq", (0,) * 3 + (1,) * 75),
        ("moonlight", {}, "q_lora_rank", None),
        ("gemma3-12B", {}, "embedding_factor", 3840**0.5),
        ("deepseek-v2", {}, "moe_router_group_topk", 3),
        ("deepseek-v2", {"topk_method": "greedy"}, "moe_router_num_groups", 1),
        ("deepseek-v2", {"first_k_dense_replace": None}, "moe_layer_freq", (1,) * 60),
        ("deepseek-v3.2", {}, "dsa_indexer_n_heads", 64),
        ("deepseek-v3.2", {"index_n_heads": None}, "dsa_indexer_n_heads", 64),
        ("deepseek-v3.2", {}, "dsa_indexer_interleaved", False),
        ("deepseek-v3.2", {"index_topk_freq": 2}, "dsa_indexer_freq", (1,) * 61),
        ("glm5-744B-A40B", {}, "dsa_indexer_interleaved", True),
        ("glm5-744B-A40B", {"index_n_heads": None}, "dsa_indexer_n_heads", 32),
        ("glm5-744B-A40B", {}, "dsa_indexer_freq", (1,) * 78),
        ("glm5-744B-A40B", {}, "moe_layer_freq", (0,) * 3 + (1,) * 75),
        ("glm5-744B-A40B", {"index_topk_freq": 4}, "dsa_indexer_freq", (1, 1, *(0, 0, 0, 1) * 19)),
        (
            "glm5-744B-A40B",
            {"index_topk_freq": 2, "index_skip_topk_offset": 3},
            "dsa_indexer_freq",
            (1, 1, 1, *(0, 1) * 37, 0),
        ),
        (
            "glm5-744B-A40B",
            {"index_topk_pattern": "FS" * 39, "index_topk_freq": 4},
            "dsa_indexer_freq",
            (1, 0) * 39,
        ),
        (
            "glm5-744B-A40B",
            {"indexer_types": ["full"] + ["shared"] * 77, "index_topk_pattern": "FS" * 39},
            "dsa_indexer_freq",
            (1,) + (0,) * 77,
        ),
        ("llama3.1-8B-Instruct", {}, "dsa_indexer_freq", None),
        ("minimax-m2", {}, "rotary_percent", 0.5),
        ("minimax-m2", {"rotary_dim": None}, "rotary_percent", 1.0),
        ("qwen1.5-MoE-A2.7B", {}, "moe_router_pre_softmax", True),
        ("mixtral-8x7B", {}, "moe_router_pre_softmax", False),
        ("gpt-oss-20b", {}, "attention_windows", (128, None) * 12),
        ("gpt-oss-20b", {"layer_types": None}, "attention_windows", (128, None) * 12),
        ("gpt-oss-20b", {}, "softmax_type", "learnable"),
        ("gpt-oss-20b", {"rope_scaling": None}, "rope", shape_of("gpt-oss-20b")["rope"]),
        ("gpt-oss-20b", {"rope_scaling": {"rope_type": "default"}}, "rope_type", "rope"),
        ("gpt-oss-20b", {"swiglu_limit": 5}, "activation_func_clamp_value", 5.0),
        ("qwen3-next-80B-A3B", {}, "linear_attention_freq", (1, 1, 1, 0) * 12),
        ("qwen3-next-80B-A3B", {"norm_topk_prob": None}, "moe_router_pre_softmax", True),
        ("qwen3-next-80B-A3B", {"linear_num_value_heads": None}, "linear_num_value_heads", 32),
        (
            "qwen3-next-80B-A3B",
            {"layer_types": ["full_attention"] + ["linear_attention"] * 47},
            "linear_attention_freq",
            (0,) + (1,) * 47,
        ),
    ],
)
def test_variants(model, change, field, value):
    assert shape_of(model, **change)[field] == value


@pytest.mark.parametrize(
    ("model", "change", "complaint"),
    [
        ("glm4-9B", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("glm4-9B", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ("mimo-7B-rl", {"use_sliding_window": True}, "use_sliding_window True"),
        ("mixtral-8x7B", {"sliding_window": 4096}, "sliding_window 4096"),
        ("mixtral-8x7B", {"num_experts_per_tok": 1}, "norm_topk_prob True"),
        ("minimax-m2", {"use_qk_norm": False}, "use_qk_norm False"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("deepseek-v3", {"norm_topk_prob": False}, "norm_topk_prob False"),
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method 'greedy'"),
        # What transformers takes in their place is another thing in each family.
        ("deepseek-v3", {"n_group": None}, "n_group: missing"),
        ("deepseek-v3.2", {"topk_group": None}, "topk_group: missing"),
        ("glm5-744B-A40B", {"routed_scaling_factor": None}, "routed_scaling_factor: missing"),
        ("deepseek-v3", {"n_group": 7}, "n_group is 7 .wanted: a divisor of n_routed_experts 256"),
        ("deepseek-v3", {"topk_group": 9}, "topk_group is 9 .wanted: an integer, 1 to 8"),
        ("deepseek-v3", {"kv_lora_rank": None}, "kv_lora_rank: missing"),
        ("deepseek-v3", {"first_k_dense_replace": 61}, "first_k_dense_replace is 61 .wanted: at least one"),
        ("deepseek-v3", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ("deepseek-v3", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1 .wanted: 2 or more"),
        ("deepseek-v3", {"attention_bias": True}, "attention_bias True"),
        ("deepseek-v3.2", {"q_lora_rank": None}, "q_lora_rank: missing"),
        ("deepseek-v3.2", {"indexer_rope_interleave": True}, "indexer_rope_interleave True"),
        (
            "deepseek-v3.2",
            {"index_head_dim": 32},
            "index_head_dim is 32 .wanted: at least qk_rope_head_dim 64",
        ),
        (
            "glm5-744B-A40B",
            {"indexer_types": ["full"]},
            "indexer_types is .* .wanted: full or shared for each",
        ),
        ("glm5-744B-A40B", {"index_topk_pattern": "FX" * 39}, "index_topk_pattern is"),
        ("glm5-744B-A40B", {"index_topk_pattern": "S" * 78}, "index_topk_pattern is .* for the first layer"),
        ("glm5-744B-A40B", {"index_skip_topk_offset": -1}, "index_skip_topk_offset is -1"),
        (
            "glm5-744B-A40B",
            {"index_topk_freq": 4, "index_skip_topk_offset": 0},
            "index_skip_topk_offset is 0 .wanted: 1 or more, .* the first layer",
        ),
        ("glm4.7-30B-A3B", {"mlp_layer_types": ["dense"]}, "mlp_layer_types is"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob True"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("deepseek-v2", {"n_group": 7}, "n_group is 7 .wanted: a divisor of n_routed_experts 160"),
        ("gpt-oss-20b", {"swiglu_alpha": 1.0}, "swiglu_alpha 1.0"),
        ("gpt-oss-20b", {"attention_bias": False}, "attention_bias False"),
        ("qwen3-next-80B-A3B", {"layer_types": ["sliding_attention"] * 48}, "layer_types is"),
        (
            "qwen3-next-80B-A3B",
            {"linear_num_value_heads": 20},
            "linear_num_value_heads is 20 .wanted: a multiple of linear_num_key_heads 16",
        ),
    ],
)
def test_what_the_trainer_would_compute_wrongly_is_refused(model, change, complaint):
    with pytest.raises(HfConfigError, match=f"config.json: {complaint}"):
        shape_of(model, **change)


GEMMA = {
    **{"model_type": "gemma3_text", "num_hidden_layers": 7, "hidden_size": 1152, "intermediate_size": 6912},
    **{"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144},
    **{"max_position_embeddings": 32768, "sliding_window": 512, "query_pre_attn_scalar": 256},
    **{"rope_theta": 1000000, "rope_local_base_freq": 10000, "hidden_activation": "gelu_pytorch_tanh"},
}


def test_gemmas_windows_and_rotary_embeddings():
    shape = FAMILIES["gemma3_text"].shape(HfConfig(GEMMA))
    assert shape.attention_windows == (512,) * 5 + (None, 512)
    assert shape.rope.base == 1e6 and shape.local_rope is not None and shape.local_rope.base == 1e4
    assert shape.softmax_scale == 1 / 16 and not shape.untie_embeddings_and_output_weights
    nested = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {}}
    scaled = FAMILIES["gemma3_text"].shape(HfConfig({**GEMMA, "rope_parameters": nested}))
    assert scaled.rope.kind == "linear" and scaled.local_rope == shape.local_rope


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ({"layer_types": ["full_attention"]}, "layer_types is"),
        ({"hidden_activation": "silu"}, "hidden_activation 'silu'"),
    ],
)
def test_what_gemma_does_not_compute_is_refused(change, complaint):
    with pytest.raises(HfConfigError, match=f"config.json: {complaint}"):
        FAMILIES["gemma3_text"].shape(HfConfig({**GEMMA, **change}))


def test_flops_of_latent_attention_and_shared_experts_counted_by_hand():
    args = shape_with(
        **dict(model_type="deepseek_v3", num_layers=2, hidden_size=4, ffn_hidden_size=6),
        **dict(num_attention_heads=2, padded_vocab_size=10, num_experts=3, moe_router_topk=2),
        **dict(moe_ffn_hidden_size=5, moe_layer_freq=(0, 1), moe_shared_expert_intermediate_size=7),
        **dict(q_lora_rank=3, kv_lora_rank=4, qk_head_dim=5, qk_pos_emb_head_dim=2, v_head_dim=6),
    )
    # Query 4x3 and 3x14; latent and rotated 4x6; keys and values 4x22; output 12x4.
    attention = 12 + 42 + 24 + 88 + 48
    mlp = 3 * 4 * 6 + 4 * (3 + 3 * 2 * 5) + 3 * 4 * 7
    linear = 2 * (2 * attention + mlp + 4 * 10)
    # Per layer, 2 heads, 3 causal pairs of 2 tokens: scores of width 7 and sums of width 6.
    assert calculate_fwd_flops([2], args) == 2 * linear + 2 * 2 * 2 * (7 + 6) * 3
    args = replace(args, q_lora_rank=None)  # a query by one matrix, 4x14
    assert calculate_fwd_flops([2], args) == 2 * (linear + 2 * 2 * (56 - 54)) + 2 * 2 * 2 * (7 + 6) * 3


def test_flops_of_sparse_attention_counted_by_hand():
    args = shape_with(
        **dict(model_type="glm_moe_dsa", num_layers=2, hidden_size=4, ffn_hidden_size=6),
        **dict(num_attention_heads=2, padded_vocab_size=10, num_experts=3, moe_router_topk=2),
        **dict(moe_ffn_hidden_size=5, moe_layer_freq=(0, 1), moe_shared_expert_intermediate_size=7),
        **dict(q_lora_rank=3, kv_lora_rank=4, qk_head_dim=5, qk_pos_emb_head_dim=2, v_head_dim=6),
        **dict(dsa_indexer_n_heads=3, dsa_indexer_head_dim=8, dsa_indexer_topk=2),
        **dict(dsa_indexer_freq=(1, 0)),
    )
    # Latent vectors and experts as above; an indexer's queries, keys and weights.
    dense = calculate_fwd_flops([4], replace(args, model_type="deepseek_v3"))
    projections, scores = 2 * 4 * (3 * 24 + 4 * 8 + 4 * 3), 2 * 10 * (24 + 3)
    # Of 10 causal pairs of 4 tokens 7 are read: 1, 2, 2 and 2.
    skipped = 2 * 2 * 2 * (7 + 6) * 3
    assert calculate_fwd_flops([4], args) == dense - skipped + projections + scores
    assert calculate_fwd_flops([4, 4], args) == 2 * calculate_fwd_flops([4], args)


def test_flops_of_delta_nets_and_gated_attention_counted_by_hand():
    args = shape_with(
        **dict(model_type="qwen3_next", num_layers=3, hidden_size=4, ffn_hidden_size=6),
        **dict(num_attention_heads=2, num_query_groups=1, kv_channels=5, padded_vocab_size=10),
        **dict(linear_attention_freq=(1, 1, 0), linear_conv_kernel_dim=3, linear_key_head_dim=2),
        **dict(linear_value_head_dim=3, linear_num_key_heads=2, linear_num_value_heads=4),
        **dict(num_experts=3, moe_router_topk=2, moe_ffn_hidden_size=5, moe_layer_freq=(0, 1, 1)),
        **dict(moe_shared_expert_intermediate_size=7),
    )
    # Query 4, key 4, value and gate 12 each, strength and decay 4 each; convolution of 20 features; states.
    delta_net = 4 * 40 + 3 * 20 + 3 * 4 * 2 * 3 + 12 * 4
    attention = 4 * (10 + 10 + 5 + 5) + 10 * 4  # query and gate, key, value; output
    mlp = 3 * 4 * 6 + 2 * (4 * (3 + 3 * 2 * 5) + 3 * 4 * 7)
    linear = 2 * (2 * delta_net + attention + mlp + 4 * 10)
    assert calculate_fwd_flops([2], args) == 2 * linear + 2 * 2 * 2 * 5 * 3
    assert calculate_fwd_flops([2, 2], args) == 2 * calculate_fwd_flops([2], args)
