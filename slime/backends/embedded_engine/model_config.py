"""The model's shape, read from an HF ``config.json``."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ARCHITECTURES = ("qwen2", "qwen3", "llama")
DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding; ``scaling`` holds the Llama-3 factors or is None."""

    theta: float
    scaling: dict[str, float] | None


@dataclass(frozen=True)
class ModelConfig:
    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    eos_token_ids: frozenset[int]
    dtype: torch.dtype

    @classmethod
    def from_directory(cls, path: str | Path, dtype: str = "auto") -> "ModelConfig":
        """Reads ``config.json`` (and the stop ids of ``generation_config.json``) of a checkpoint.

        Raises:
            ValueError: the architecture, or an option of it, is not one the engine can compute.
        """
        config_file = Path(path) / "config.json"
        if not config_file.is_file():
            raise ValueError(f"--model-path {path}: no config.json there")
        raw = json.loads(config_file.read_text())
        model_type = raw.get("model_type")
        if model_type not in ARCHITECTURES:
            raise ValueError(f"{config_file}: model_type {model_type!r} (wanted: one of {ARCHITECTURES})")
        _refuse_unsupported(raw, config_file)
        heads = raw["num_attention_heads"]
        attention_bias = bool(raw.get("attention_bias", False))
        return cls(
            model_type=model_type,
            architectures=tuple(raw.get("architectures") or ()),
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            max_position_embeddings=raw.get("max_position_embeddings", 2048),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or model_type == "qwen2",
            output_bias=attention_bias and model_type != "qwen2",
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=model_type == "qwen3",
            rope=_rope(raw, config_file),
            eos_token_ids=_eos_token_ids(raw, Path(path) / "generation_config.json"),
            dtype=_dtype(raw, dtype),
        )


def _refuse_unsupported(raw: dict[str, Any], config_file: Path) -> None:
    wanted = {"hidden_act": "silu", "use_sliding_window": False, "partial_rotary_factor": 1.0}
    for key, value in wanted.items():
        if raw.get(key, value) != value:
            raise ValueError(f"{config_file}: {key} {raw[key]!r} is not supported (wanted: {value!r})")


def _rope(raw: dict[str, Any], config_file: Path) -> RopeConfig:
    """Understands ``rope_parameters`` (transformers 5) and ``rope_theta`` + ``rope_scaling`` (before)."""
    parameters = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta, None)
    if kind != "llama3":
        raise ValueError(f"{config_file}: rope type {kind!r} is not supported (wanted: default or llama3)")
    factors = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return RopeConfig(theta, {name: float(parameters[name]) for name in factors})


def _eos_token_ids(raw: dict[str, Any], generation_file: Path) -> frozenset[int]:
    found = [raw.get("eos_token_id")]
    if generation_file.is_file():
        found.append(json.loads(generation_file.read_text()).get("eos_token_id"))
    ids: set[int] = set()
    for value in found:
        if value is not None:
            ids.update(value if isinstance(value, list) else [value])
    return frozenset(ids)


def _dtype(raw: dict[str, Any], requested: str) -> torch.dtype:
    name = requested if requested != "auto" else raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ValueError(f"--dtype {name}: not supported (wanted: one of {sorted(DTYPES)})")
    return DTYPES[name]
