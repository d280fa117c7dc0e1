"""Whether an engine that someone else has started can be given the adapters of a run."""

from collections.abc import Iterator, Mapping
from typing import Any

from slime.config.lora import LoraConfig


def without_adapters(lora: LoraConfig, where: str, told: Mapping[str, Any]) -> Iterator[str]:
    """Yields why an engine would not have the adapters that it is to get beside the base, one line each.

    Args:
        where: what the lines begin with.
        told: the options that it was started with, as far as it tells them.
    """
    if not lora.serves_adapter:
        return
    if not told.get("enable_lora", True):
        yield f"{where}: was started without --enable-lora (wanted: it, for --no-lora-merge)"
        return
    least = {"max_lora_rank": lora.lora_rank, "max_loaded_loras": len(lora.served_adapters)}
    for dest, wanted in least.items():
        if (found := told.get(dest)) is not None and found < wanted:
            yield f"{where}: was started with {dest} {found} (wanted: at least {wanted}, for --no-lora-merge)"
    for dest in ("tokenizer_worker_num", "dp_size"):
        if (found := told.get(dest) or 1) > 1:
            yield f"{where}: was started with {dest} {found} (wanted: 1, for --no-lora-merge)"
