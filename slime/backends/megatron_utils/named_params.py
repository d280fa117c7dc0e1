"""Parameters of this rank under names that are the same whatever the parallel layout."""

from collections.abc import Iterator, Sequence

import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import get_model_config, unwrap_model

_LAYERS = "decoder.layers."


def strip_param_name_prefix(name: str) -> str:
    """Removes the ``module.`` that each wrapper (DDP, Float16Module) puts before a name."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def named_params(model: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(global name, parameter) of all chunks: layers are numbered over the whole model, from 0."""
    for chunk in model:
        offset = get_transformer_layer_offset(
            get_model_config(chunk), getattr(unwrap_model(chunk), "vp_stage", None)
        )
        for local_name, param in chunk.named_parameters():
            name = strip_param_name_prefix(local_name)
            if name.startswith(_LAYERS):
                layer, rest = name.removeprefix(_LAYERS).split(".", 1)
                name = f"{_LAYERS}{int(layer) + offset}.{rest}"
            yield name, param


def partition_dim(param: torch.Tensor) -> int | None:
    """The dimension that tensor parallelism splits, or None if every rank holds the whole parameter."""
    if mpu.get_tensor_model_parallel_world_size() == 1 or not getattr(param, "tensor_model_parallel", False):
        return None
    return int(vars(param)["partition_dim"])
