"""Exports adapters as a directory in PEFT's format."""

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from slime.adapters.peft_format import write_adapter
from slime.config.lora import LoraConfig
from slime.training.checkpoint_dir import on_first_rank
from slime.training.checkpoint_errors import explained
from slime.training.weights import Weights

_BUCKET_BYTES = 256 * 1024**2


def save_peft(
    path: str | Path, base: str | Path, config: LoraConfig, names: Iterable[str], weights: Weights
) -> None:
    """Collective. Writes the adapters to the directory ``path``, in which PEFT finds them.

    Args:
        base: directory of the model that they belong to.
        names: those of the tensors of the model.
        weights: in the form `ADAPTER`.

    Raises:
        CheckpointError: rank 0 could not write; all raise it.
    """
    if Path(path).resolve() == Path(base).resolve():
        raise ValueError(f"--save-hf {path}: is --hf-checkpoint itself (wanted: another directory)")
    tensors: dict[str, torch.Tensor] = {}
    for bucket in weights.buckets(_BUCKET_BYTES):
        if dist.get_rank() == 0:
            tensors.update({name: tensor.detach().cpu().clone() for name, tensor in bucket})
    modules = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    with explained(path, "written", "space there, and leave to write"):
        on_first_rank(lambda: write_adapter(path, tensors, config, str(Path(base).resolve()), modules))
