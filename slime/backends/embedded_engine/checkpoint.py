"""Reads HF safetensors checkpoints."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from slime.backends.embedded_engine.parameters import Parameters


def safetensors_files(path: str | Path) -> list[Path]:
    """The weight files of a checkpoint directory: those of its index, else all ``*.safetensors``."""
    directory = Path(path)
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [directory / name for name in names]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{directory}: no *.safetensors there")
    return files


def iterate_checkpoint(path: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a checkpoint one by one, so that only one is in memory beside the model."""
    for file in safetensors_files(path):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (safe_open is no mapping)
                yield name, opened.get_tensor(name)


def load_checkpoint(parameters: Parameters, path: str | Path) -> None:
    """Fills all weights from a checkpoint.

    Raises:
        ValueError: the checkpoint lacks a weight, or has one that does not fit.
    """
    missing = set(parameters.named)
    for name, tensor in iterate_checkpoint(path):
        parameters.update([(name, tensor)])
        missing.discard(name)
    if missing:
        raise ValueError(f"{path}: {len(missing)} weights are missing, e.g. {sorted(missing)[0]}")


def load_random(parameters: Parameters, seed: int) -> None:
    """What ``--load-format dummy`` serves: small random matrices and norms of one."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in parameters.named.items():
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, 0.02, generator=generator)
