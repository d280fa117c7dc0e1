"""Parameters of this rank under names that are the same whatever the parallel layout."""

import re
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import get_model_config, unwrap_model

_IN_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(transformer_layer\.)?(.+)")
_EXPERTS = "mlp.experts.local_experts."


def strip_param_name_prefix(name: str) -> str:
    """Removes the ``module.`` that each wrapper (DDP, Float16Module) puts before a name."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def named_params(model: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(global name, parameter) of all chunks: layers and experts are those of the whole model, from 0."""
    for chunk in model:
        experts, offset = get_model_config(chunk).num_moe_experts, _first_layer(chunk)
        for local_name, param in chunk.named_parameters():
            yield _global_name(strip_param_name_prefix(local_name), offset, experts), param


def named_weights(model: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """`named_params`, and what belongs to the weights without gradients: biases of experts, in float32."""
    for chunk in model:
        yield from named_params([chunk])
        offset = _first_layer(chunk)
        for local_name, module in chunk.named_modules():
            bias = getattr(module, "expert_bias", None)
            if bias is not None:
                yield _global_name(f"{strip_param_name_prefix(local_name)}.expert_bias", offset, None), bias


def _global_name(name: str, first_layer: int, num_experts: int | None) -> str:
    match = _IN_LAYER.fullmatch(name)
    if match is None:
        return name
    # Multi-token prediction (MTP) are all on one stage.
    number = int(match[2]) + (first_layer if match[1] == "decoder" else 0)
    return f"{match[1]}.layers.{number}.{match[3] or ''}{_with_global_expert(match[4], num_experts)}"


def _first_layer(chunk: torch.nn.Module) -> int:
    """The number of its first layer in the whole model."""
    vp_stage = getattr(unwrap_model(chunk), "vp_stage", None)
    return int(get_transformer_layer_offset(get_model_config(chunk), vp_stage))


def _with_global_expert(name: str, num_experts: int | None) -> str:
    """A name within a layer, the number of its expert counted over all expert-parallel ranks."""
    if num_experts is None or not name.startswith(_EXPERTS):
        return name
    first = mpu.get_expert_model_parallel_rank() * (num_experts // mpu.get_expert_model_parallel_world_size())
    return with_expert(name, first)


def with_expert(name: str, offset: int) -> str:
    """The name of an expert's parameter for the expert ``offset`` places after it."""
    before, rest = name.split(_EXPERTS)
    number, after = rest.split(".", 1)
    return f"{before}{_EXPERTS}{int(number) + offset}.{after}"


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to an expert, and so is split over the expert-parallel ranks."""
    return _EXPERTS in name


def is_of_mtp(name: str) -> bool:
    """Whether a parameter belongs to a MTP layer."""
    return name.startswith("mtp.")


def partition_dim(name: str, param: torch.Tensor) -> int | None:
    """The dimension that tensor parallelism splits, or None if every rank of the group holds it whole."""
    group = shard_group(name)
    if group.size() == 1 or not getattr(param, "tensor_model_parallel", False):
        return None
    return int(vars(param)["partition_dim"])


def shard_group(name: str) -> dist.ProcessGroup:
    """The tensor-parallel ranks that a parameter is split over; experts may be split over others."""
    if is_expert(name):
        return mpu.get_expert_tensor_parallel_group()
    return mpu.get_tensor_model_parallel_group()


def ranks_of_a_copy() -> frozenset[int]:
    """The ranks that together hold all parameters, and share a group with one another, directly or not."""
    dense = dist.get_process_group_ranks(mpu.get_model_parallel_group())
    experts = dist.get_process_group_ranks(mpu.get_expert_tensor_model_pipeline_parallel_group())
    small, large = sorted((dense, experts), key=len)
    # Groups are blocks of neighbouring ranks. If the small ones do not fill large ones, they chain them up.
    return frozenset(large if len(large) % len(small) == 0 else range(dist.get_world_size()))
