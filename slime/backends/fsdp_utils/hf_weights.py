"""The whole model as buckets of Hugging Face tensors, gathered from the shards of all ranks."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from slime.adapters.lora import added, merged
from slime.backends.fsdp_utils.lora import Adapter, adapters_of
from slime.backends.fsdp_utils.named_tensors import as_in_checkpoints, units
from slime.backends.fsdp_utils.optimizer import local
from slime.training.weights import ADAPTER, BASE, FULL, NamedTensors, TensorInfo, require_form


class FsdpHfTensors:
    """A model's parameters under the names of its checkpoints, in ``dtype``; tied ones once.

    Buffers are in the format in which the model computes with them, as float32 biases of experts are.

    ``transformers`` keeps some weights in another form than checkpoints do, the experts of a layer in one
    tensor for instance; they are given in the form of the checkpoints.

    In the form `FULL` weights have in them what adapters add, in the form `BASE` they have not. In the form
    `ADAPTER` it is the adapters alone, under the names that PEFT has for them.

    Attributes:
        ranks: all of them have to iterate in step.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, form: str = FULL) -> None:
        require_form(form, FULL, BASE, ADAPTER)
        self._model, self._dtype, self._form = model, dtype, form
        self._adapters = adapters_of(model)
        self._rounded: list[torch.Tensor] = []
        self.ranks = frozenset(range(dist.get_world_size()))
        self.stage = 0

    @property
    def rounding(self) -> float:
        """What of this rank's rows was lost; see `Weights`."""
        if not self._rounded:
            return 0.0
        lost, of = torch.stack(self._rounded).sum(0).sqrt().tolist()
        return lost / of if of else 0.0

    def _units(self) -> Iterator[NamedTensors]:
        if self._form != ADAPTER:
            yield from units(self._model)
            return
        for adapter in self._adapters.values():
            for name, param in adapter.parts():
                yield [(name, param)]

    def _as_stored(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors if self._form == ADAPTER else as_in_checkpoints(self._model, tensors)

    def manifest(self) -> list[TensorInfo]:
        """Goes the way of the tensors with empty ones."""
        return list(self._announced())

    def _announced(self) -> Iterator[TensorInfo]:
        for unit in self._units():
            empty = {
                name: torch.empty(tensor.shape, dtype=self._dtype_of(tensor), device="meta")
                for name, tensor in unit
            }
            shard = _shard(unit[0][1]) if len(unit) == 1 else None
            for name, tensor in self._as_stored(empty).items():
                yield TensorInfo(name, tuple(tensor.shape), tensor.dtype, shard)

    def buckets(self, max_bytes: int) -> Iterator[NamedTensors]:
        """Lists of at most ``max_bytes``; what fits in none, or must stay together, comes alone."""
        self._rounded = []
        bucket: NamedTensors = []
        used = 0
        for unit in self._units():
            size = sum(tensor.numel() * self._dtype_of(tensor).itemsize for _, tensor in unit)
            if bucket and used + size > max_bytes:
                yield self._gather(bucket)
                bucket, used = [], 0
            bucket += unit
            used += size
        if bucket:
            yield self._gather(bucket)

    def own_buckets(self, max_bytes: int) -> Iterator[NamedTensors]:
        """All of them: there are no pipeline stages."""
        return self.buckets(max_bytes)

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        return self._dtype if isinstance(tensor, torch.nn.Parameter) else tensor.dtype

    @torch.no_grad()
    def _gather(self, bucket: NamedTensors) -> NamedTensors:
        whole = {name: _whole(self._part(name, tensor)) for name, tensor in bucket}
        return list(self._as_stored(whole).items())

    def _part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's rows, with what an adapter adds to them."""
        part, adapter = self._converted(tensor), self._adapters.get(name)
        return part if adapter is None or self._form != FULL else self._merged(part, adapter)

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        # Shards are converted before they are gathered, which may halve the bytes.
        part: Any = tensor.detach().to(self._dtype_of(tensor))
        if isinstance(part, DTensor) and part.device.type != part.device_mesh.device_type:
            return part.to(part.device_mesh.device_type)  # --fsdp-cpu-offload
        return part

    def _merged(self, part: torch.Tensor, adapter: Adapter) -> torch.Tensor:
        """A is gathered, which is small; of B a rank has the same rows as of the weight."""
        down, up = _whole(self._converted(adapter.lora_A)), self._converted(adapter.lora_B)
        own, more = local(part), added(down, local(up), adapter.scale)
        whole = merged(own, more)
        if own.dtype != torch.float32:
            lost = whole.float() - own.float() - more
            self._rounded.append(torch.stack([lost.square().sum(), more.square().sum()]))
        if not isinstance(part, DTensor):
            return whole
        mesh, placements = part.device_mesh, part.placements
        return DTensor.from_local(whole, mesh, placements, shape=part.shape, stride=part.stride())


def _whole(part: torch.Tensor) -> torch.Tensor:
    whole: torch.Tensor = part.full_tensor() if isinstance(part, DTensor) else part
    return whole


def _shard(tensor: torch.Tensor) -> tuple[int, int] | None:
    """(dimension, parts) of a parameter that FSDP has split."""
    return (0, tensor.device_mesh.size()) if isinstance(tensor, DTensor) else None
