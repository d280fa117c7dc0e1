"""Fills the weights, from an HF checkpoint or at random."""

from pathlib import Path

import torch

from slime.backends.embedded_engine.named_weights import NamedWeights
from slime.models.checkpoint.weights_dir import WeightsReader


def load_checkpoint(parameters: NamedWeights, path: str | Path) -> None:
    """Fills all weights from a checkpoint; quantised ones are dequantised.

    Raises:
        ValueError: the checkpoint lacks a weight, or has one that does not fit.
    """
    missing = set(parameters.named)
    with WeightsReader(path) as reader:
        for name, tensor in reader.items():
            parameters.update([(name, tensor)])
            missing.discard(name)
    if missing:
        raise ValueError(f"{path}: {len(missing)} weights are missing, e.g. {sorted(missing)[0]}")


def load_random(parameters: NamedWeights, seed: int) -> None:
    """What ``--load-format dummy`` serves: small random matrices and norms of one."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in parameters.named.items():
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        else:
            # on the host, so that a seed means the same weights on any device
            tensor.copy_(torch.empty_like(tensor, device="cpu").normal_(0.0, 0.02, generator=generator))
