"""Which linear layers have an adapter, by their Hugging Face names."""

import re
from collections.abc import Iterable

from slime.config.lora import ALL_LINEAR, LoraConfig


def names_module(pattern: str, module: str) -> bool:
    """Whether a pattern names a module: its whole name, its end after a dot, or a regex of all of it."""
    return module == pattern or module.endswith(f".{pattern}") or bool(re.fullmatch(pattern, module))


def is_target(config: LoraConfig, module: str) -> bool:
    """Whether a linear layer has an adapter, one of an expert's only if it `is_named` too."""
    if any(names_module(pattern, module) for pattern in config.lora_exclude_modules):
        return False
    return ALL_LINEAR in config.lora_target_modules or is_named(config, module)


def is_named(config: LoraConfig, module: str) -> bool:
    """Whether a target names it otherwise than by standing for all."""
    return any(names_module(pattern, module) for pattern in config.lora_target_modules)


def short_targets(adapted: Iterable[str], others: Iterable[str]) -> list[str]:
    """What PEFT has to be told to find the adapted modules again and no others: last names if they do."""
    names, taken = sorted(adapted), {module.rpartition(".")[2] for module in others}
    ends = {module.rpartition(".")[2] for module in names}
    return sorted(ends) if not ends & taken else names


def without_adapter(config: LoraConfig, module: str) -> ValueError:
    """The error for a target that names what can have no adapter."""
    return ValueError(
        f"--lora-target-modules {' '.join(config.lora_target_modules)}: names {module}, which has no adapter "
        "here (wanted: linear layers of the decoder; of experts with --train-backend megatron alone, where "
        "checkpoints have tensors of each)"
    )


def no_target(config: LoraConfig) -> ValueError:
    """The error for a model of which no layer gets an adapter."""
    targets, excluded = (" ".join(x) for x in (config.lora_target_modules, config.lora_exclude_modules))
    without = f" --lora-exclude-modules {excluded}" if excluded else ""
    return ValueError(
        f"--lora-target-modules {targets}{without}: no linear layer is a target (wanted: names such as "
        "q_proj, or all-linear)"
    )


ADAPTERS = ".adapters."
"""What stands between the name of a layer and those of its adapters' parameters."""


def is_of_adapter(name: str) -> bool:
    """Whether a parameter of a trainer's model belongs to an adapter, and so is none of the base's."""
    return ADAPTERS in name
