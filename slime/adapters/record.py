"""What a checkpoint says of its adapters, so that no other ones go on from it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.config.lora import LoraConfig

RECORD = "lora"
"""The name of a `lora_record` among the plain values of a checkpoint."""


def lora_record(config: LoraConfig) -> dict[str, Any]:
    """What a checkpoint says of its adapters."""
    return {
        "--lora-rank": config.lora_rank,
        "--lora-alpha": config.lora_alpha,
        "--lora-use-rslora": config.lora_use_rslora,
        "--lora-target-modules": sorted(config.lora_target_modules),
        "--lora-exclude-modules": sorted(config.lora_exclude_modules),
        **({"--lora-adapters": config.named_adapters} if config.named_adapters else {}),
    }


def require_same_adapters(own: Mapping[str, Any] | None, saved: Mapping[str, Any] | None, path: Path) -> None:
    """Refuses a checkpoint of other adapters, or one of adapters where all weights train, or the other way.

    Args:
        own: the `lora_record` of this run, None if it has no adapters.
        saved: that of the checkpoint.
    """
    if own is None and saved is None:
        return
    if saved is None:
        raise ValueError(
            f"checkpoint {path}: holds all weights and no adapters (wanted: no --lora-rank, or it as "
            "--ref-load and another --load)"
        )
    if own is None:
        raise ValueError(
            f"checkpoint {path}: holds adapters alone (wanted: --lora-rank {saved['--lora-rank']})"
        )
    for flag in {**saved, **own}:
        if own.get(flag) != saved.get(flag):
            raise ValueError(
                f"checkpoint {path}: was made with {flag} {saved.get(flag)} (wanted: it, not {own.get(flag)})"
            )


def require_all_weights(common: Mapping[str, Any], path: Path) -> None:
    """Refuses a checkpoint of adapters where a whole model is wanted.

    Args:
        common: its plain values.
    """
    if RECORD in common:
        raise ValueError(f"checkpoint {path}: holds adapters alone (wanted: one of all weights)")
