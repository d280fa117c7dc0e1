"""The whole model as buckets of Hugging Face tensors, gathered from the shards of all ranks."""

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from slime.backends.fsdp_utils.model import named_tensors
from slime.training.weights import NamedTensors, TensorInfo


class FsdpHfTensors:
    """A model's parameters under the names of its checkpoints, in ``dtype``; tied ones once.

    Buffers are in the format in which the model computes with them, as float32 biases of experts are.

    ``transformers`` keeps some weights in another form than checkpoints do, the experts of a layer in one
    tensor for instance; they are given in the form of the checkpoints.

    Attributes:
        ranks: all of them have to iterate in step.
    """

    rounding = 0.0  # there are no adapters

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self._model, self._dtype = model, dtype
        self.ranks = frozenset(range(dist.get_world_size()))

    def manifest(self) -> list[TensorInfo]:
        """Goes the way of the tensors with empty ones."""
        return list(self._announced())

    def _announced(self) -> Iterator[TensorInfo]:
        for unit in units(self._model):
            empty = {
                name: torch.empty(tensor.shape, dtype=self._dtype_of(tensor), device="meta")
                for name, tensor in unit
            }
            shard = _shard(unit[0][1]) if len(unit) == 1 else None
            for name, tensor in as_in_checkpoints(self._model, empty).items():
                yield TensorInfo(name, tuple(tensor.shape), tensor.dtype, shard)

    def buckets(self, max_bytes: int) -> Iterator[NamedTensors]:
        """Lists of at most ``max_bytes``; what fits in none, or must stay together, comes alone."""
        bucket: NamedTensors = []
        used = 0
        for unit in units(self._model):
            size = sum(tensor.numel() * self._dtype_of(tensor).itemsize for _, tensor in unit)
            if bucket and used + size > max_bytes:
                yield self._gather(bucket)
                bucket, used = [], 0
            bucket += unit
            used += size
        if bucket:
            yield self._gather(bucket)

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        return self._dtype if isinstance(tensor, torch.nn.Parameter) else tensor.dtype

    @torch.no_grad()
    def _gather(self, bucket: NamedTensors) -> NamedTensors:
        return list(
            as_in_checkpoints(self._model, {name: self._whole(tensor) for name, tensor in bucket}).items()
        )

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        # Shards are converted before they are gathered, which may halve the bytes.
        part: Any = tensor.detach().to(self._dtype_of(tensor))
        if not isinstance(part, DTensor):
            return part
        if part.device.type != part.device_mesh.device_type:  # --fsdp-cpu-offload
            part = part.to(part.device_mesh.device_type)
        whole: torch.Tensor = part.full_tensor()
        return whole


def _shard(tensor: torch.Tensor) -> tuple[int, int] | None:
    """(dimension, parts) of a parameter that FSDP has split."""
    return (0, tensor.device_mesh.size()) if isinstance(tensor, DTensor) else None


def units(model: PreTrainedModel) -> Iterator[NamedTensors]:
    """Tensors that a conversion may join stay together: those of a layer."""
    if not any(isinstance(each, WeightConverter) for each in model._weight_conversions):
        yield from ([pair] for pair in named_tensors(model))
        return
    for _, pairs in groupby(named_tensors(model), lambda pair: _layer_of(pair[0])):
        yield list(pairs)


def as_in_checkpoints(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A unit's tensors in the form and under the names of checkpoints; views of them where possible."""
    if model._weight_conversions:
        tensors = revert_weight_conversion(model, tensors)
    return {model._weight_prefix.outer(name): tensor for name, tensor in tensors.items()}


def _layer_of(name: str) -> str:
    """``model.layers.3`` of every name in that layer, the name itself elsewhere."""
    match = re.match(r"(.*?\.\d+)\.", name)
    return match[1] if match else name
