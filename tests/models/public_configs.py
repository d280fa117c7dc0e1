"""The sizes that the config.json of published models give, by the name of their file in scripts/models."""

from typing import Any

from tests.models.public_dense_configs import DENSE_CONFIGS

_DEEPSEEK: dict[str, Any] = {
    **{"model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432},
    **{"num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "rms_norm_eps": 1e-6},
    **{"max_position_embeddings": 163840, "rope_theta": 10000, "tie_word_embeddings": False},
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
    **{"v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8},
    **{"moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4},
    **{"routed_scaling_factor": 2.5, "norm_topk_prob": True, "scoring_func": "sigmoid"},
    **{"topk_method": "noaux_tc", "moe_layer_freq": 1, "num_nextn_predict_layers": 1},
    "rope_scaling": {
        **{"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32},
        **{"beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
}
_DEEPSEEK_V2 = _DEEPSEEK | {
    **{"model_type": "deepseek_v2", "num_hidden_layers": 60, "hidden_size": 5120, "vocab_size": 102400},
    **{"intermediate_size": 12288, "n_routed_experts": 160, "n_shared_experts": 2, "num_experts_per_tok": 6},
    **{"moe_intermediate_size": 1536, "first_k_dense_replace": 1, "topk_group": 3},
    **{"routed_scaling_factor": 16.0, "norm_topk_prob": False, "scoring_func": "softmax"},
    **{"topk_method": "group_limited_greedy", "num_nextn_predict_layers": 0},
    "rope_scaling": _DEEPSEEK["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
}
_DEEPSEEK_V32 = _DEEPSEEK | {
    **{"model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048},
}
_GLM5 = {
    **{"model_type": "glm_moe_dsa", "num_hidden_layers": 78, "hidden_size": 6144, "intermediate_size": 12288},
    **{"num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 154880, "rms_norm_eps": 1e-5},
    **{"max_position_embeddings": 202752, "tie_word_embeddings": False, "attention_bias": False},
    **{"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "rope_interleave": True},
    **{"q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64},
    **{"v_head_dim": 256, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8},
    **{"moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_group": 1, "topk_group": 1},
    **{"routed_scaling_factor": 2.5, "norm_topk_prob": True, "scoring_func": "sigmoid"},
    **{"topk_method": "noaux_tc", "moe_layer_freq": 1, "num_nextn_predict_layers": 1},
    **{"index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "indexer_rope_interleave": True},
}
_KIMI = _DEEPSEEK | {
    **{"model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840},
    **{"rope_theta": 50000.0, "n_routed_experts": 384, "first_k_dense_replace": 1, "n_group": 1},
    **{"topk_group": 1, "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0},
    "rope_scaling": _DEEPSEEK["rope_scaling"] | {"factor": 32.0, "beta_fast": 1.0},
}
_GLM4 = {
    **{"model_type": "glm4", "num_hidden_layers": 40, "hidden_size": 4096, "intermediate_size": 13696},
    **{"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151552},
    **{"max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 10000.0},
    **{"partial_rotary_factor": 0.5, "attention_bias": True, "tie_word_embeddings": False},
}
_GLM_MOE = {
    **{"model_type": "glm4_moe", "num_hidden_layers": 46, "hidden_size": 4096, "intermediate_size": 10944},
    **{"num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552},
    **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1000000},
    **{"partial_rotary_factor": 0.5, "attention_bias": True, "tie_word_embeddings": False},
    **{"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1},
    **{"moe_intermediate_size": 1408, "first_k_dense_replace": 1, "topk_group": 1, "use_qk_norm": False},
    **{"routed_scaling_factor": 1.0, "norm_topk_prob": True, "num_nextn_predict_layers": 1},
}
_GPT_OSS = {
    **{"model_type": "gpt_oss", "num_hidden_layers": 24, "hidden_size": 2880, "intermediate_size": 2880},
    **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088},
    **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000},
    **{"attention_bias": True, "tie_word_embeddings": False, "num_local_experts": 32},
    **{"num_experts_per_tok": 4, "sliding_window": 128, "swiglu_limit": 7.0},
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "rope_scaling": {
        **{"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
        **{"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    },
}
_QWEN = {"rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "vocab_size": 151936, "tie_word_embeddings": False}

_QWEN3_MOE = _QWEN | {
    **{"model_type": "qwen3_moe", "num_experts_per_tok": 8, "norm_topk_prob": True, "head_dim": 128},
    **{"max_position_embeddings": 40960, "decoder_sparse_step": 1, "num_experts": 128},
}
_QWEN3_30B = _QWEN3_MOE | {
    **{"num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32},
    **{"num_key_value_heads": 4, "moe_intermediate_size": 768},
}
_QWEN3_235B = _QWEN3_MOE | {
    **{"num_hidden_layers": 94, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 64},
    **{"num_key_value_heads": 4, "moe_intermediate_size": 1536},
}
_QWEN2_MOE = _QWEN | {
    **{"model_type": "qwen2_moe", "norm_topk_prob": False, "decoder_sparse_step": 1},
    "use_sliding_window": False,
}
_MIXTRAL = {
    **{"model_type": "mixtral", "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "num_local_experts": 8},
    **{"num_experts_per_tok": 2, "sliding_window": None, "tie_word_embeddings": False},
    "num_key_value_heads": 8,
}

CONFIGS: dict[str, dict[str, Any]] = {
    **DENSE_CONFIGS,
    "deepseek-v3": _DEEPSEEK,
    "deepseek-v3-20layer": _DEEPSEEK | {"num_hidden_layers": 20},
    "deepseek-v3-5layer": _DEEPSEEK | {"num_hidden_layers": 5},
    "deepseek-v3.2": _DEEPSEEK_V32,
    "glm5-744B-A40B": _GLM5,
    "glm5.2-744B-A40B": _GLM5,
    "deepseek-v2": _DEEPSEEK_V2,
    "deepseek-v2-lite": _DEEPSEEK_V2
    | {
        **{"num_hidden_layers": 27, "hidden_size": 2048, "intermediate_size": 10944, "q_lora_rank": None},
        **{"num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64},
        **{"moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
        "routed_scaling_factor": 1.0,
    },
    "kimi-k2": _KIMI,
    "kimi-k2-thinking": _KIMI
    | {"rms_norm_eps": 1e-5, "rope_scaling": _KIMI["rope_scaling"] | {"factor": 64.0}},
    "moonlight": {
        **{name: value for name, value in _DEEPSEEK.items() if name != "rope_scaling"},
        **{"num_hidden_layers": 27, "hidden_size": 2048, "intermediate_size": 11264, "q_lora_rank": None},
        **{"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 163840, "rope_theta": 50000},
        **{"max_position_embeddings": 8192, "n_routed_experts": 64, "n_shared_experts": 2},
        **{"num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1},
        **{"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446, "rms_norm_eps": 1e-5},
    },
    "glm4.7-30B-A3B": {
        **{"model_type": "glm4_moe_lite", "num_hidden_layers": 47, "hidden_size": 2048},
        **{"intermediate_size": 10240, "num_attention_heads": 20, "num_key_value_heads": 20},
        **{"vocab_size": 154880, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5},
        **{"rope_theta": 1000000, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192},
        **{"qk_rope_head_dim": 64, "v_head_dim": 256, "n_routed_experts": 64, "n_shared_experts": 1},
        **{"num_experts_per_tok": 4, "moe_intermediate_size": 1536, "first_k_dense_replace": 1},
        **{"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8, "norm_topk_prob": True},
        **{"topk_method": "noaux_tc", "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0},
    },
    "glm4-9B": _GLM4,
    "glm4-32B": _GLM4
    | {
        **{"num_hidden_layers": 61, "hidden_size": 6144, "intermediate_size": 23040},
        **{"num_attention_heads": 48, "attention_bias": False},
    },
    "glm4.5-106B-A12B": _GLM_MOE,
    "glm4.5-355B-A32B": _GLM_MOE
    | {
        **{"num_hidden_layers": 92, "hidden_size": 5120, "intermediate_size": 12288, "use_qk_norm": True},
        **{"n_routed_experts": 160, "moe_intermediate_size": 1536, "first_k_dense_replace": 3},
        "routed_scaling_factor": 2.5,
    },
    "mimo-7B-rl": {
        **{"model_type": "mimo", "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 11008},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151680},
        **{"max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 640000},
        **{"attention_bias": True, "num_nextn_predict_layers": 1, "tie_word_embeddings": False},
    },
    "gpt-oss-20b": _GPT_OSS,
    "gpt-oss-120b": _GPT_OSS
    | {
        **{"num_hidden_layers": 36, "num_local_experts": 128},
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
    "minimax-m2": {
        **{"model_type": "minimax_m2", "num_hidden_layers": 62, "hidden_size": 3072},
        **{"intermediate_size": 1536, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128},
        **{"vocab_size": 200064, "max_position_embeddings": 196608, "rms_norm_eps": 1e-6},
        **{"rope_theta": 5000000, "rotary_dim": 64, "num_local_experts": 256, "num_experts_per_tok": 8},
        **{"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True},
        **{"qk_norm_type": "per_layer", "shared_intermediate_size": 0, "tie_word_embeddings": False},
    },
    "qwen3-30B-A3B": _QWEN3_30B,
    "qwen3-30B-A3B-Instruct-2507": _QWEN3_30B | {"rope_theta": 10000000, "max_position_embeddings": 262144},
    "qwen3-235B-A22B": _QWEN3_235B,
    "qwen3-235B-A22B-Instruct-2507": _QWEN3_235B | {"rope_theta": 5000000, "max_position_embeddings": 262144},
    "qwen3-coder-480B-A35B": _QWEN3_MOE
    | {
        **{"num_hidden_layers": 62, "hidden_size": 6144, "intermediate_size": 8192, "num_experts": 160},
        **{"num_attention_heads": 96, "num_key_value_heads": 8, "moe_intermediate_size": 2560},
        **{"rope_theta": 10000000, "max_position_embeddings": 262144},
    },
    "qwen3-next-80B-A3B": _QWEN
    | {
        **{"model_type": "qwen3_next", "num_hidden_layers": 48, "hidden_size": 2048},
        **{"intermediate_size": 5120, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256},
        **{"max_position_embeddings": 262144, "num_experts": 512, "num_experts_per_tok": 10},
        **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True},
        **{"decoder_sparse_step": 1, "mlp_only_layers": [], "rope_theta": 10000000},
        **{"partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_conv_kernel_dim": 4},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16},
        **{"linear_num_value_heads": 32, "attention_bias": False, "use_sliding_window": False},
    },
    "qwen1.5-MoE-A2.7B": _QWEN2_MOE
    | {
        **{"num_hidden_layers": 24, "hidden_size": 2048, "intermediate_size": 5632, "num_experts": 60},
        **{"num_attention_heads": 16, "num_key_value_heads": 16, "num_experts_per_tok": 4},
        **{"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
        "max_position_embeddings": 8192,
    },
    "qwen2-57B-A14B-Instruct": _QWEN2_MOE
    | {
        **{"num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944, "num_experts": 64},
        **{"num_attention_heads": 28, "num_key_value_heads": 4, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480},
        "max_position_embeddings": 32768,
    },
    "mixtral-8x7B": _MIXTRAL
    | {
        **{"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000},
        **{"num_attention_heads": 32, "max_position_embeddings": 32768},
    },
    "mixtral-8x22B": _MIXTRAL
    | {
        **{"num_hidden_layers": 56, "hidden_size": 6144, "intermediate_size": 16384, "vocab_size": 32768},
        **{"num_attention_heads": 48, "max_position_embeddings": 65536},
    },
}
