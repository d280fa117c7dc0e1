"""The sizes in the config.json of published dense models, by the name of their file in scripts/models."""

from typing import Any

_NAMES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
_NAMES += ("num_key_value_heads", "vocab_size", "tie_word_embeddings")


def _rows(table: dict[str, tuple[Any, ...]], **common: Any) -> dict[str, dict[str, Any]]:
    """A config for each row: the values of `_NAMES`, then whatever else differs."""
    return {
        model: {**common, **dict(zip(_NAMES, row, strict=False)), **(row[7] if len(row) > 7 else {})}
        for model, row in table.items()
    }


_QWEN = {"rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu", "use_sliding_window": False}
_QWEN2 = _rows(
    {
        "qwen2.5-0.5B": (24, 896, 4864, 14, 2, 151936, True),
        "qwen2.5-1.5B": (28, 1536, 8960, 12, 2, 151936, True),
        "qwen2.5-3B": (36, 2048, 11008, 16, 2, 151936, True),
        "qwen2.5-7B": (28, 3584, 18944, 28, 4, 152064, False),
        "qwen2.5-14B-Instruct": (48, 5120, 13824, 40, 8, 152064, False),
        "qwen2.5-32B": (64, 5120, 27648, 40, 8, 152064, False, {"rms_norm_eps": 1e-5}),
        "qwen2.5-72B-Instruct": (80, 8192, 29568, 64, 8, 152064, False),
    },
    **{**_QWEN, "model_type": "qwen2", "max_position_embeddings": 32768},
)
_QWEN3_4B = (36, 2560, 9728, 32, 8, 151936, True)
_QWEN3 = _rows(
    {
        "qwen3-0.6B": (28, 1024, 3072, 16, 8, 151936, True),
        "qwen3-1.7B": (28, 2048, 6144, 16, 8, 151936, True),
        "qwen3-4B": _QWEN3_4B,
        "qwen3-4B-Instruct-2507": (
            *_QWEN3_4B,
            {"rope_theta": 5000000, "max_position_embeddings": 262144},
        ),
        "qwen3-8B": (36, 4096, 12288, 32, 8, 151936, False),
        "qwen3-14B": (40, 5120, 17408, 40, 8, 151936, False),
        "qwen3-32B": (64, 5120, 25600, 64, 8, 151936, False),
    },
    **{**_QWEN, "model_type": "qwen3", "head_dim": 128, "attention_bias": False},
    max_position_embeddings=40960,
)


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_scaling": {
            **{"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings": 8192,
        }
    }


_LLAMA3_2_3B = (28, 3072, 8192, 24, 8, 128256, True, {**_llama3_rope(32.0), "head_dim": 128})
_LLAMA = _rows(
    {
        "llama3.1-8B-Instruct": (32, 4096, 14336, 32, 8, 128256, False, _llama3_rope(8.0)),
        "llama3.3-70B-Instruct": (80, 8192, 28672, 64, 8, 128256, False, _llama3_rope(8.0)),
        "llama3.2-1B-Instruct": (16, 2048, 8192, 32, 8, 128256, True, {**_llama3_rope(32.0), "head_dim": 64}),
        "llama3.2-3B-Instruct": _LLAMA3_2_3B,
        "llama3.2-3B-Instruct-amd": _LLAMA3_2_3B,
    },
    **{"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu"},
    max_position_embeddings=131072,
)
_GEMMA3 = _rows(
    {
        "gemma3-1B": (26, 1152, 6912, 4, 1, 262144, True),
        "gemma3-270M": (18, 640, 2048, 4, 1, 262144, True),
    },
    **{"model_type": "gemma3_text", "rms_norm_eps": 1e-6, "rope_theta": 1000000, "head_dim": 256},
    **{"hidden_activation": "gelu_pytorch_tanh", "rope_local_base_freq": 10000, "sliding_window": 512},
    **{"sliding_window_pattern": 6, "query_pre_attn_scalar": 256, "max_position_embeddings": 32768},
)

DENSE_CONFIGS: dict[str, dict[str, Any]] = {**_QWEN2, **_QWEN3, **_LLAMA, **_GEMMA3}
