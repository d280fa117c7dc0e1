"""PEFT's ``adapter_config.json``, without torch."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slime.config.lora import LoraConfig

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

# What is not computed here, with the values that ask for none of it.
_IDLE: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    **dict.fromkeys(("use_dora", "lora_bias", "fan_in_fan_out", "use_qalora"), (False, None)),
    **dict.fromkeys(("modules_to_save", "rank_pattern", "alpha_pattern"), (None, [], {})),
    **dict.fromkeys(("layer_replication", "target_parameters"), (None, [], {})),
    "trainable_token_indices": (None, [], {}),
}
_FLAGS = {"r": "--lora-rank", "lora_alpha": "--lora-alpha", "use_rslora": "--lora-use-rslora"}


def peft_config(config: LoraConfig, base: str, targets: list[str]) -> dict[str, Any]:
    """What PEFT's own LoraConfig reads.

    Args:
        base: what it is told to load the adapter onto.
    """
    alpha = config.lora_alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.lora_rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": config.lora_dropout,
        "use_rslora": config.lora_use_rslora,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def served_config(config: LoraConfig, modules: Iterable[str]) -> dict[str, Any]:
    """What engines are told of an adapter of these modules.

    SGLang takes alpha / rank for the scale, whatever ``use_rslora`` says, and knows modules by last names.
    """
    ends = sorted({module.rpartition(".")[2] for module in modules})
    alpha = config.lora_scale * config.lora_rank
    return peft_config(config, "", ends) | {"lora_alpha": alpha, "use_rslora": False}


def scale_of(found: Mapping[str, Any]) -> float:
    """The factor of what an adapter gives.

    Raises:
        KeyError, TypeError, ValueError, ZeroDivisionError: its config does not say.
    """
    rank = int(found["r"])
    return float(found["lora_alpha"]) / (math.sqrt(rank) if found.get("use_rslora") else rank)


def not_computed(found: Mapping[str, Any]) -> list[str]:
    """What the config of an adapter asks for and nothing here computes, a line each."""
    return [
        f"says {key} {found[key]!r}, which is not computed here (wanted: {idle[0]!r})"
        for key, idle in _IDLE.items()
        if key in found and found[key] not in idle
    ]


def unlike(path: str | Path, config: LoraConfig) -> list[str]:
    """What keeps a run from starting with the adapter at ``path``, a line each."""
    try:
        found = json.loads((Path(path) / CONFIG_FILE).read_text())
    except (OSError, ValueError) as error:
        return [f"{CONFIG_FILE} cannot be read: {error}"]
    if not isinstance(found, dict):
        return [f"{CONFIG_FILE} is no JSON object"]
    if not (Path(path) / WEIGHTS_FILE).is_file():
        return [f"has no {WEIGHTS_FILE}"]
    wrong = [f"{CONFIG_FILE} {line}" for line in not_computed(found)]
    own = {"r": config.lora_rank, "lora_alpha": config.lora_alpha, "use_rslora": config.lora_use_rslora}
    wrong += [
        f"{CONFIG_FILE} says {key} {found.get(key)} (wanted: {value}, as {_FLAGS[key]} has it)"
        for key, value in own.items()
        if found.get(key, False) != value
    ]
    return wrong
