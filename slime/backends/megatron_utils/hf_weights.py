"""Hugging Face tensors into this rank's parameters, and the whole model as buckets of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from slime.adapters.lora import merged
from slime.adapters.targets import is_of_adapter
from slime.backends.megatron_utils.held_weights import held_tensors
from slime.backends.megatron_utils.leftovers import refuse_leftovers
from slime.backends.megatron_utils.lora import adapter_layers, adapter_rules
from slime.backends.megatron_utils.named_params import (
    is_expert,
    is_of_mtp,
    named_weights,
    partition_dim,
    ranks_of_a_copy,
    shard_group,
    with_expert,
)
from slime.backends.megatron_utils.value_head import is_of_value_head
from slime.config.model import ModelConfig
from slime.models import family_of
from slime.models.checkpoint.load_shard import ShardSpec, load_shard
from slime.models.checkpoint.safetensors_dir import TensorReader
from slime.models.checkpoint.weights_dir import WeightsReader
from slime.models.rules import Rule
from slime.models.served_layout import ServedTensor, served_layout
from slime.training.weights import (
    ADAPTER,
    BASE,
    FULL,
    HeldTensor,
    NamedTensors,
    TensorInfo,
    require_form,
)


@dataclass(frozen=True)
class ParamInfo:
    """A parameter of some pipeline stage, as every rank knows it.

    That of an expert stands for those at the same place of all expert-parallel ranks, and has the name that
    it has on this one. ``shape`` is one rank's shard; ``dim`` the sharded dimension, None if there is none.
    """

    name: str
    stage: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that hold different parts of what it stands for, None if each has all of it."""
        if is_expert(self.name):
            return mpu.get_expert_tensor_and_model_parallel_group()
        return None if self.dim is None else mpu.get_tensor_model_parallel_group()

    @property
    def shard(self) -> tuple[int, int] | None:
        """(dimension, parts) of the full parameter."""
        return None if self.dim is None else (self.dim, shard_group(self.name).size())

    @property
    def full_bytes(self) -> int:
        parts = self.group.size() if self.group is not None else 1
        return parts * self.dtype.itemsize * torch.Size(self.shape).numel()


class HfWeights:
    """Gathers the parameters over the tensor-, expert- and pipeline-parallel groups, bucket by bucket.

    In the form `FULL` weights have in them what adapters add, each rank its own part of both, in the form
    `BASE` they have not. In the form `ADAPTER` it is the adapters alone, under the names that PEFT has for
    them.

    Every rank of the groups that hold one copy of the model (``ranks``) must iterate, in step with the
    others, and every one of them gets every full tensor. Copies are independent of each other.

    Tensors of a bucket may be views of the parameters: use them before the next optimizer step, and do not
    write to them.
    """

    def __init__(self, shape: ModelConfig, model: Sequence[torch.nn.Module], form: str = FULL) -> None:
        require_form(form, FULL, BASE, ADAPTER)
        self._shape = shape
        self.ranks = ranks_of_a_copy()
        self.stage = mpu.get_pipeline_model_parallel_rank()
        rules = family_of(shape.model_type).weights
        # The copy of a tied embedding on the last pipeline stage, for one, has no tensor in checkpoints.
        absent = rules.absent(shape)
        rule_for: Callable[[str], Rule] = partial(rules.rule_for, num_layers=shape.num_layers)
        self._rule_for = cache(adapter_rules(shape) if form == ADAPTER else rule_for)
        self._params = {
            name: param
            for name, param in named_weights(model)
            if name not in absent and is_of_adapter(name) == (form == ADAPTER)
        }
        self._adapters = adapter_layers(model) if form == FULL else {}
        self._device = torch.cuda.current_device()
        self._infos = self._all_infos()
        self._forget_rounding()

    def _forget_rounding(self) -> None:
        self._added = torch.zeros((), device=self._device)
        self._lost = torch.zeros_like(self._added)

    @property
    def rounding(self) -> float:
        """What of this rank's parts was lost; see `Weights`."""
        return float((self._lost / self._added).sqrt()) if self._added else 0.0

    def manifest(self) -> list[TensorInfo]:
        """Goes the way of the tensors with empty ones."""
        return list(self._announced())

    def _announced(self) -> Iterator[TensorInfo]:
        stacks = Stacks(self._shape)
        for info in self._infos:
            count = info.group.size() if info.group is not None else 1
            parts = [torch.empty(info.shape, dtype=info.dtype, device="meta")] * count
            for name, expert, tensor in self._converted(info, parts):
                whole = tensor if expert is None else stacks.add(name, expert, tensor)
                if whole is not None:
                    shard = info.shard if expert is None else None
                    yield TensorInfo(name, tuple(whole.shape), whole.dtype, shard, info.stage)

    def buckets(self, max_bytes: int) -> Iterator[NamedTensors]:
        """Lists of (HF name, tensor) of at most ``max_bytes`` each; a larger parameter comes alone."""
        return self._joined_buckets(self._infos, max_bytes, over_stages=True)

    def own_buckets(self, max_bytes: int) -> Iterator[NamedTensors]:
        """See `StagedWeights`."""
        own = [info for info in self._infos if info.stage == self.stage]
        return self._joined_buckets(own, max_bytes, over_stages=False)

    def _joined_buckets(
        self, infos: Sequence[ParamInfo], max_bytes: int, over_stages: bool
    ) -> Iterator[NamedTensors]:
        self._forget_rounding()
        stacks = Stacks(self._shape)
        for bucket in _packed(infos, max_bytes):
            pairs = []
            for name, expert, tensor in self._gather(bucket, over_stages):
                if expert is None:
                    pairs.append((name, tensor))
                elif (stack := stacks.add(name, expert, tensor)) is not None:
                    yield [(name, stack)]
            if pairs:
                yield pairs

    def held(self) -> list[HeldTensor]:
        """What this rank holds; see `ShardedWeights`."""
        shapes = {info.name: info.shape for info in self.manifest()}
        return held_tensors(self._shape, self._params, self._rule_for, shapes)

    def parts(self) -> Callable[[str], torch.Tensor]:
        self._forget_rounding()
        return self._shard

    def served(self, rank: int, size: int) -> list[ServedTensor]:
        return served_layout(self._shape, self._shape if self._shape.num_experts else None, rank, size)

    def _all_infos(self) -> list[ParamInfo]:
        """The parameters of all pipeline stages in order, identical on every rank."""
        local = [
            ParamInfo(name, self.stage, tuple(param.shape), param.dtype, partition_dim(name, param))
            for name, param in self._params.items()
        ]
        stages: list[list[ParamInfo]] = [local] * mpu.get_pipeline_model_parallel_world_size()
        if len(stages) > 1:
            dist.all_gather_object(stages, local, group=mpu.get_pipeline_model_parallel_group())
        return list(chain.from_iterable(stages))

    @torch.no_grad()
    def _gather(
        self, bucket: list[ParamInfo], over_stages: bool
    ) -> list[tuple[str, int | None, torch.Tensor]]:
        """(HF name, expert, tensor); with an expert it is that one's part of the tensor of that name."""
        # Shards cross pipeline stages before they are joined: that moves 1 / TP of the bytes.
        shards = self._broadcast_over_stages(bucket) if over_stages else [self._shard(i.name) for i in bucket]
        gathered = _gather_parts(bucket, shards)
        return [
            piece
            for info, parts in zip(bucket, gathered, strict=True)
            for piece in self._converted(info, parts)
        ]

    def _converted(
        self, info: ParamInfo, parts: list[torch.Tensor]
    ) -> Iterator[tuple[str, int | None, torch.Tensor]]:
        for name, full in self._joined(info, parts):
            rule = self._rule_for(name)
            for hf_name, tensor in zip(rule.hf_names, rule.split(full, self._shape), strict=True):
                yield hf_name, rule.expert, tensor

    def _joined(self, info: ParamInfo, parts: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full tensor) of the parameters that these parts, one of each rank of a group, make up."""
        if not is_expert(info.name):
            yield info.name, self._unsharded(info, parts)
            return
        ranks, own = mpu.get_expert_model_parallel_world_size(), mpu.get_expert_model_parallel_rank()
        shards = len(parts) // ranks
        for rank in range(ranks):
            name = with_expert(info.name, (rank - own) * (self._shape.num_experts // ranks))
            yield name, self._unsharded(info, parts[rank * shards : (rank + 1) * shards])

    def _unsharded(self, info: ParamInfo, shards: list[torch.Tensor]) -> torch.Tensor:
        if info.dim is None:
            return shards[0]
        return self._rule_for(info.name).unshard(shards, info.dim)

    def _broadcast_over_stages(self, bucket: list[ParamInfo]) -> list[torch.Tensor]:
        group = mpu.get_pipeline_model_parallel_group()
        shards, waiting = [], []
        for info in bucket:
            if info.stage == self.stage:
                shard = self._shard(info.name)
            else:
                shard = torch.empty(info.shape, dtype=info.dtype, device=self._device)
            shards.append(shard)
            if group.size() > 1:
                source = dist.get_global_rank(group, info.stage)
                waiting.append(dist.broadcast(shard, source, group=group, async_op=True))
        _wait_all(waiting)
        return shards

    def _shard(self, name: str) -> torch.Tensor:
        weight, adapters = self._params[name].data, self._adapters.get(name)
        if adapters is None:
            return weight
        added = adapters.added()
        whole = merged(weight, added)
        if weight.dtype != torch.float32:
            self._added += added.square().sum()
            self._lost += (whole.float() - weight.float() - added).square().sum()
        return whole


class Stacks:
    """Tensors of a layer that hold all of its experts, put together expert by expert.

    Layers come one after the other, so that those of one layer are in memory.
    """

    def __init__(self, shape: ModelConfig) -> None:
        self._shape = shape
        self._open: dict[str, tuple[torch.Tensor, set[int]]] = {}

    def add(self, name: str, expert: int, tensor: torch.Tensor) -> torch.Tensor | None:
        """Takes the part of an expert; returns the tensor once it has all of them."""
        if name not in self._open:
            self._open[name] = tensor.new_empty(self._shape.num_experts, *tensor.shape), set()
        stack, there = self._open[name]
        stack[expert] = tensor
        there.add(expert)
        if len(there) < self._shape.num_experts:
            return None
        del self._open[name]
        return stack


def _packed(infos: Sequence[ParamInfo], max_bytes: int) -> Iterator[list[ParamInfo]]:
    bucket: list[ParamInfo] = []
    used = 0
    for info in infos:
        needed = info.full_bytes
        if bucket and used + needed > max_bytes:
            yield bucket
            bucket, used = [], 0
        bucket.append(info)
        used += needed
    if bucket:
        yield bucket


def _gather_parts(bucket: list[ParamInfo], shards: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The shards of all ranks of a parameter's group, in their order; one where there is no group."""
    gathered, waiting = [], []
    for info, shard in zip(bucket, shards, strict=True):
        if info.group is None or info.group.size() == 1:
            gathered.append([shard])
            continue
        out = shard.new_empty(info.group.size() * shard.size(0), *shard.shape[1:])
        gathered.append(list(out.chunk(info.group.size())))
        waiting.append(dist.all_gather_into_tensor(out, shard.contiguous(), group=info.group, async_op=True))
    _wait_all(waiting)
    return gathered


def _wait_all(works: list[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


@torch.no_grad()
def load_hf_weights(
    shape: ModelConfig, model: Sequence[torch.nn.Module], path: str | Path, with_mtp: bool = True
) -> None:
    """Fills every parameter of this rank but those of a value head and of adapters.

    Values are converted to the parameter's dtype.
    A rank reads its own part of each tensor, and some megabytes at once. Quantised weights are dequantised.
    Without ``with_mtp`` MTP layers stay as they are: of a reference nothing reads them.

    The caller copies the new values into the optimizer's float32 weights (``reload_model_params``).

    Raises:
        ValueError: a tensor is missing, is left over, or has another shape than the model wants.
    """
    with WeightsReader(path) as reader:
        refuse_leftovers(shape, reader)
        for name, param in named_weights(model):
            if is_of_value_head(param) or is_of_adapter(name):
                continue
            if with_mtp or not is_of_mtp(name):
                fill_param(shape, reader, name, param.data, like=param)


def fill_param(
    shape: ModelConfig, reader: TensorReader, name: str, target: torch.Tensor, like: torch.Tensor
) -> None:
    """Fills ``target`` with what this rank holds of a parameter; ``like`` is the parameter itself.

    Raises:
        ValueError: a tensor is missing, or has another shape than the model wants.
    """
    weights = family_of(shape.model_type).weights
    if name in weights.absent(shape):
        # The last pipeline stage's copy of the tied embedding.
        name = "embedding.word_embeddings.weight"
    dim, group = partition_dim(name, like), shard_group(name)
    shard = ShardSpec() if dim is None else ShardSpec(dim, group.rank(), group.size())
    load_shard(target, weights.rule_for(name, shape.num_layers), reader, shape, shard, f"for {name}")
