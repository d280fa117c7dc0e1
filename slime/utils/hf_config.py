"""The model's shape, read from the ``config.json`` of a Hugging Face checkpoint.

``shape_from_hf_config(path)`` answers with Megatron-named fields, so that ``--hf-checkpoint`` is all that a
user has to say about the architecture. Only what the trainer computes exactly is accepted; everything else
is refused by name rather than approximated.
"""

import json
from pathlib import Path
from typing import Any

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")

# What megatron-core's llama-3 RoPE scaling hard-codes (rotary_pos_embedding.py, `_apply_scaling`).
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

_REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)


class HfConfigError(ValueError):
    """The checkpoint's config.json is missing, unreadable, or describes a model that is not supported."""


def read_hf_config(path: str | Path) -> dict[str, Any]:
    """The parsed ``config.json`` of the checkpoint directory ``path``.

    Raises:
        HfConfigError: no such file, or it is not a JSON object.
    """
    file = Path(path) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise HfConfigError(
            f"{file}: not found (wanted: a local Hugging Face checkpoint directory)"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise HfConfigError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise HfConfigError(f"{file}: holds {type(config).__name__} (wanted: a JSON object)")
    return config


def shape_from_hf_config(path: str | Path) -> dict[str, Any]:
    """Megatron-named shape fields of the checkpoint directory ``path``.

    Raises:
        HfConfigError: see `read_hf_config` and `shape_from_config_dict`.
    """
    return shape_from_config_dict(read_hf_config(path), origin=str(Path(path) / "config.json"))


def shape_from_config_dict(config: dict[str, Any], origin: str = "config.json") -> dict[str, Any]:
    """Translates a Hugging Face config into Megatron's field names.

    ``kv_channels`` is the size of one attention head, ``num_query_groups`` the number of key/value heads.

    Raises:
        HfConfigError: an unsupported model type or feature, or a missing field.
    """
    model_type = _checked_model_type(config, origin)
    _refuse_unsupported(config, model_type, origin)
    hidden_size, heads = config["hidden_size"], config["num_attention_heads"]
    epsilon = float(config.get("rms_norm_eps", 1e-6))
    return {
        "model_type": model_type,
        "num_layers": config["num_hidden_layers"],
        "hidden_size": hidden_size,
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "kv_channels": _head_size(config, model_type),
        "norm_epsilon": epsilon,
        "layernorm_epsilon": epsilon,
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["max_position_embeddings"],
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "qk_layernorm": model_type == "qwen3",
        "add_qkv_bias": model_type == "qwen2",
        **_rope_fields(config, origin),
    }


def pad_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel_size: int) -> int:
    """``vocab_size`` rounded up to a multiple of ``divisible_by * tensor_parallel_size``."""
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def _checked_model_type(config: dict[str, Any], origin: str) -> str:
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        wanted = ", ".join(SUPPORTED_MODEL_TYPES)
        raise HfConfigError(f"{origin}: model_type {model_type!r} is not supported (wanted: {wanted})")
    missing = [name for name in _REQUIRED if not isinstance(config.get(name), int)]
    if missing:
        raise HfConfigError(f"{origin}: {', '.join(missing)}: missing or not an integer")
    return model_type


def _refuse_unsupported(config: dict[str, Any], model_type: str, origin: str) -> None:
    wanted = {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False, "attention_dropout": 0.0}
    if model_type != "qwen2":
        wanted["attention_bias"] = False
    for name, value in wanted.items():
        if config.get(name, value) != value:
            raise HfConfigError(f"{origin}: {name} {config[name]!r} is not supported (wanted: {value!r})")
    if config.get("quantization_config"):
        raise HfConfigError(f"{origin}: quantization_config is not supported (wanted: unquantised weights)")


def _head_size(config: dict[str, Any], model_type: str) -> int:
    if config.get("head_dim"):
        return config["head_dim"]
    # Qwen3Config's default; the other two derive it from the hidden size.
    return 128 if model_type == "qwen3" else config["hidden_size"] // config["num_attention_heads"]


def _rope_fields(config: dict[str, Any], origin: str) -> dict[str, Any]:
    """RoPE base and scaling; transformers 5 nests them, 4 has ``rope_theta`` and ``rope_scaling``."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    base = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    fields = {"rotary_base": base, "use_rope_scaling": kind == "llama3", "rope_scaling_factor": 8.0}
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise HfConfigError(f"{origin}: partial_rotary_factor is not supported (wanted: 1.0)")
    if kind == "default":
        return fields
    if kind != "llama3":
        raise HfConfigError(f"{origin}: RoPE type {kind!r} is not supported (wanted: default or llama3)")
    for name, value in _LLAMA3_ROPE.items():
        if rope.get(name, value) != value:
            raise HfConfigError(f"{origin}: RoPE {name} {rope[name]!r} is not supported (wanted: {value})")
    return {**fields, "rope_scaling_factor": float(rope["factor"])}
