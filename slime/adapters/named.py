"""Several adapters on one base: which of them a sample is of, and where each begins."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.adapters.peft_config import CONFIG_FILE
from slime.config.lora import LoraConfig


def unnamed(config: LoraConfig, metadata: Mapping[str, Any]) -> str | None:
    """What is wrong with a sample's metadata, as they name none of the adapters; None if they do."""
    found = metadata.get(config.lora_adapter_key)
    if found in config.named_adapters:
        return None
    said = f"{config.lora_adapter_key} {found!r}" if found is not None else f"no {config.lora_adapter_key}"
    return f"its metadata have {said} (wanted: one of --lora-adapters, {', '.join(config.named_adapters)})"


def adapter_of(config: LoraConfig, metadata: Mapping[str, Any]) -> str | None:
    """The name of the adapter that a sample with these metadata is of; None where adapters have no names.

    Raises:
        ValueError: the metadata name none of them.
    """
    if not config.named_adapters:
        return None
    if reason := unnamed(config, metadata):
        raise ValueError(reason)
    return str(metadata[config.lora_adapter_key])


def first_adapters(config: LoraConfig) -> dict[str | None, Path]:
    """The directories of ``--lora-adapter-path`` by the names of the adapters that begin as they say; under
    None what all begin as.
    """
    if config.lora_adapter_path is None:
        return {}
    path = Path(config.lora_adapter_path)
    if config.named_adapters and not (path / CONFIG_FILE).is_file():
        return {name: path / name for name in config.named_adapters}
    return {None: path}
