"""Adapters in PEFT's format: a directory with ``adapter_config.json`` and ``adapter_model.safetensors``."""

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from slime.adapters.peft_config import CONFIG_FILE, WEIGHTS_FILE, peft_config
from slime.adapters.targets import short_targets
from slime.config.lora import LoraConfig

_PREFIX = "base_model.model."


def tensor_name(module: str, part: str) -> str:
    """The name of ``lora_A`` or ``lora_B`` of a module of the model."""
    return f"{_PREFIX}{module}.{part}.weight"


def module_of(name: str) -> str:
    """The module that a tensor of an adapter belongs to."""
    return name.removeprefix(_PREFIX).rpartition(".lora_")[0]


def write_adapter(
    path: str | Path,
    tensors: Mapping[str, torch.Tensor],
    config: LoraConfig,
    base: str,
    modules: Iterable[str],
) -> None:
    """Writes beside ``path``, then moves it there; files of these names are replaced. Failing leaves nothing.

    Args:
        tensors: by `tensor_name`.
        base: what PEFT is told to load the adapter onto.
        modules: those of the model with a weight.
    """
    target, adapted = Path(path), {module_of(name) for name in tensors}
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    saved = {name: tensor.contiguous().cpu().clone() for name, tensor in tensors.items()}
    targets = short_targets(adapted, set(modules) - adapted)
    text = json.dumps(peft_config(config, base, targets), indent=2, sort_keys=True)
    try:
        save_file(saved, partial / WEIGHTS_FILE, {"format": "pt"})
        (partial / CONFIG_FILE).write_text(text + "\n")
        target.mkdir(parents=True, exist_ok=True)
        for file in partial.iterdir():
            file.replace(target / file.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_adapter(path: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of an adapter, on the CPU."""
    with safe_open(Path(path) / WEIGHTS_FILE, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def misfit(name: str, found: torch.Tensor | None, shape: Sequence[int]) -> str:
    """What is wrong with a tensor of an adapter that is to be of this shape."""
    what = "is missing" if found is None else f"has another shape: {list(found.shape)}"
    return f"{name} {what} (wanted: {list(shape)} for --lora-target-modules)"


def left_over(names: Sequence[str]) -> str:
    """What is wrong with an adapter of which there is no place for these tensors."""
    return (
        f"{len(names)} tensors of modules that are no target, e.g. {names[0]} (wanted: --lora-target-modules "
        "as the adapter has them)"
    )
