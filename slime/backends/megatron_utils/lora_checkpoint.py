"""Adapters in checkpoints, which hold nothing else of the model, and out of PEFT's directories."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint

from slime.adapters.peft_format import left_over, misfit, read_adapter
from slime.adapters.targets import is_of_adapter
from slime.backends.megatron_utils.lora import adapter_rules
from slime.backends.megatron_utils.named_params import (
    is_expert,
    named_params,
    partition_dim,
    shard_group,
)
from slime.config.model import ModelConfig


def adapter_params(model: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """The parameters of this rank's adapters by their global names."""
    return {name: param for name, param in named_params(model) if is_of_adapter(name)}


def adapter_state(model: Sequence[torch.nn.Module]) -> dict[str, ShardedTensor]:
    """The sharded adapters of this rank, by names that no layout changes."""
    return {
        name: make_sharded_tensor_for_checkpoint(param, name, **_groups(name))
        if (dim := partition_dim(name, param)) is None
        else make_tp_sharded_tensor_for_checkpoint(param, name, dim, **_groups(name))
        for name, param in adapter_params(model).items()
    }


def _groups(name: str) -> dict[str, dist.ProcessGroup]:
    """The ranks that split a parameter, and those that have copies, where they are not those of attention."""
    if not is_expert(name):
        return {}
    return {"tp_group": shard_group(name), "dp_cp_group": mpu.get_expert_data_parallel_group()}


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
            raise ValueError(f"--lora-adapter-path {path}: {misfit(peft_name, whole, param.shape)}")
        param.copy_(whole)
    _refuse_others(path, tensors, used)


def _refuse_others(path: str | Path, tensors: Iterable[str], used: list[str]) -> None:
    """Refuses tensors that no rank has a place for. Collective."""
    of_ranks: list[list[str]] = [used] * dist.get_world_size()
    dist.all_gather_object(of_ranks, used)
    if others := sorted({*tensors}.difference(*of_ranks)):
        raise ValueError(f"--lora-adapter-path {path}: {left_over(others)}")
