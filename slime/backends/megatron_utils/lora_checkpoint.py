"""Adapters in checkpoints, which hold nothing else of the model, and in PEFT's directories."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint

from slime.adapters.peft_format import read_adapter, write_adapter
from slime.adapters.targets import is_of_adapter
from slime.backends.megatron_utils.lora import adapter_rules
from slime.backends.megatron_utils.named_params import (
    named_params,
    partition_dim,
    shard_group,
)
from slime.config.lora import LoraConfig
from slime.config.model import ModelConfig
from slime.models import family_of
from slime.training.checkpoint_dir import on_first_rank
from slime.training.checkpoint_errors import explained
from slime.training.weights import Weights

_BUCKET_BYTES = 256 * 1024**2


def adapter_params(model: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """The parameters of this rank's adapters by their global names."""
    return {name: param for name, param in named_params(model) if is_of_adapter(name)}


def adapter_state(model: Sequence[torch.nn.Module]) -> dict[str, ShardedTensor]:
    """The sharded adapters of this rank, by names that no layout changes."""
    return {
        name: make_sharded_tensor_for_checkpoint(param, name)
        if (dim := partition_dim(name, param)) is None
        else make_tp_sharded_tensor_for_checkpoint(param, name, dim)
        for name, param in adapter_params(model).items()
    }


@torch.no_grad()
def load_adapter_state(model: Sequence[torch.nn.Module], loaded: Mapping[str, torch.Tensor]) -> None:
    """Fills the adapters with what was loaded for an `adapter_state`."""
    for name, param in adapter_params(model).items():
        param.copy_(loaded[name])


def kept_adapters(chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The adapters of a model chunk as they are; empty where there are none."""
    return {name: value for name, value in chunk.state_dict().items() if is_of_adapter(name)}


@torch.no_grad()
def turn_off(model: Sequence[torch.nn.Module]) -> None:
    """Makes the adapters add nothing."""
    for name, param in adapter_params(model).items():
        if name.endswith(".lora_B"):
            param.zero_()


@torch.no_grad()
def load_peft(path: str | Path, shape: ModelConfig, model: Sequence[torch.nn.Module]) -> None:
    """Fills the adapters with this rank's parts of those at ``path``.

    Raises:
        ValueError: the adapter is of other modules or shapes.
    """
    tensors, rule_for = read_adapter(path), adapter_rules(shape)
    used = list[str]()
    for name, param in adapter_params(model).items():
        (peft_name,) = rule_for(name).hf_names
        used.append(peft_name)
        whole = tensors.get(peft_name)
        if whole is not None and (dim := partition_dim(name, param)) is not None:
            whole = whole.chunk(shard_group(name).size(), dim)[shard_group(name).rank()]
        if whole is None or whole.shape != param.shape:
            found = "is missing" if whole is None else f"has another shape: {list(whole.shape)}"
            raise ValueError(
                f"--lora-adapter-path {path}: {peft_name} {found} (wanted: {list(param.shape)} for "
                "--lora-target-modules)"
            )
        param.copy_(whole)
    _refuse_others(path, tensors, used)


def _refuse_others(path: str | Path, tensors: Iterable[str], used: list[str]) -> None:
    """Refuses tensors that no rank has a place for. Collective."""
    of_ranks: list[list[str]] = [used] * dist.get_world_size()
    dist.all_gather_object(of_ranks, used)
    if others := sorted({*tensors}.difference(*of_ranks)):
        raise ValueError(
            f"--lora-adapter-path {path}: {len(others)} tensors of modules that are no target, e.g. "
            f"{others[0]} (wanted: --lora-target-modules as the adapter has them)"
        )


def lora_record(config: LoraConfig) -> dict[str, Any]:
    """What a checkpoint says of its adapters."""
    return {
        "--lora-rank": config.lora_rank,
        "--lora-alpha": config.lora_alpha,
        "--lora-use-rslora": config.lora_use_rslora,
        "--lora-target-modules": sorted(config.lora_target_modules),
        "--lora-exclude-modules": sorted(config.lora_exclude_modules),
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
    for flag, value in saved.items():
        if own[flag] != value:
            raise ValueError(f"checkpoint {path}: was made with {flag} {value} (wanted: it, not {own[flag]})")


def save_peft(path: str | Path, base: str, config: LoraConfig, shape: ModelConfig, weights: Weights) -> None:
    """Collective. Writes the adapters to the directory ``path``, in which PEFT finds them.

    Args:
        base: directory of the model that they belong to.
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
    names = family_of(shape.model_type).weights.hf_names(shape)
    modules = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    with explained(path, "written", "space there, and leave to write"):
        on_first_rank(lambda: write_adapter(path, tensors, config, str(Path(base).resolve()), modules))
