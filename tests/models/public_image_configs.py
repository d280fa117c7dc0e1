"""The sizes in the config.json of models that read images, by the name of their file in scripts/models.

Those of the language model are in ``text_config``.
"""

from typing import Any

_NAMES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
_NAMES += ("num_key_value_heads", "linear_num_value_heads")
_ROPE = {
    **{"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    **{"mrope_interleaved": True, "mrope_section": [11, 11, 10]},
}
_QWEN3_5 = {
    **{"head_dim": 256, "vocab_size": 248320, "rms_norm_eps": 1e-6, "max_position_embeddings": 262144},
    **{"hidden_act": "silu", "attention_bias": False, "attn_output_gate": True, "dtype": "bfloat16"},
    **{"full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "linear_num_key_heads": 16, "rope_parameters": _ROPE},
    **{"eos_token_id": 248044, "mtp_num_hidden_layers": 1},
}


def _qwen3_5(*sizes: int | None, tied: bool = False, **others: Any) -> dict[str, Any]:
    kind = "qwen3_5_moe" if "num_experts" in others else "qwen3_5"
    named = {name: size for name, size in zip(_NAMES, sizes, strict=True) if size is not None}
    text = {**_QWEN3_5, **named, **others, "model_type": f"{kind}_text", "tie_word_embeddings": tied}
    return {
        **{"model_type": kind, "text_config": text, "vision_config": {"model_type": kind, "depth": 27}},
        **{"image_token_id": 248056, "video_token_id": 248057, "tie_word_embeddings": tied},
    }


_A3B = _qwen3_5(
    *(40, 2048, None, 16, 2, 32),
    **{"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512},
    shared_expert_intermediate_size=512,
)


def _gemma3(**text: Any) -> dict[str, Any]:
    """Published files leave out what is the default."""
    scaled = {"rope_type": "linear", "factor": 8.0}
    inner = {"model_type": "gemma3_text", "rope_scaling": scaled, "sliding_window": 1024, **text}
    return {"model_type": "gemma3", "text_config": inner, "vision_config": {"hidden_size": 1152}}


IMAGE_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8B": _qwen3_5(24, 1024, 3584, 8, 2, 16, tied=True),
    "qwen3.5-4B": _qwen3_5(32, 2560, 9216, 16, 4, 32, tied=True),
    "qwen3.5-9B": _qwen3_5(32, 4096, 12288, 16, 4, 32),
    "qwen3.5-27B": _qwen3_5(64, 5120, 17408, 24, 4, 48),
    "qwen3.5-35B-A3B": _A3B,
    "qwen3.5-35B-A3B-vl": _A3B,
    "gemma3-4B": _gemma3(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34),
    "gemma3-12B": _gemma3(
        **{"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48},
        **{"num_attention_heads": 16, "num_key_value_heads": 8},
    ),
    "gemma3-27B": _gemma3(
        **{"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "head_dim": 128},
        **{"num_attention_heads": 32, "num_key_value_heads": 16, "query_pre_attn_scalar": 168},
    ),
}
