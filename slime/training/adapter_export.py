"""Exports adapters as a directory in PEFT's format, and what is trained as whatever holds it."""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from slime.adapters.peft_format import write_adapter
from slime.config.backend import BackendConfig
from slime.config.lora import LoraConfig
from slime.training.checkpoint_dir import on_first_rank
from slime.training.checkpoint_errors import explained
from slime.training.hf_export import ExportBase, save_hf_model_to_path
from slime.training.weights import ADAPTER, FULL, Weights

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


def save_trained(
    config: BackendConfig,
    path: str | Path,
    base: str | Path | None,
    names: Callable[[], Iterable[str]],
    weights: Callable[[str, str | None], Weights],
) -> None:
    """Collective. Writes the model to the directory ``path``; where adapters are trained, them, or both.

    Args:
        base: directory of the model that adapters belong to; None where all weights are trained.
        names: those of the tensors of that model.
        weights: in a form, of an adapter if they are in that of one.
    """
    if base is None or config.lora.lora_save_merged:
        save_hf_model_to_path(ExportBase.of(config), path, weights(FULL, None))
    if base is not None:
        target = Path(path, "adapter") if config.lora.lora_save_merged else Path(path)
        known = list(names())
        for adapter in config.lora.each_adapter:
            save_peft(target / (adapter or ""), base, config.lora, known, weights(ADAPTER, adapter))
