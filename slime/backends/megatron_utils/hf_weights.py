"""The whole model as buckets of Hugging Face tensors, whatever the parallel layout."""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from slime.backends.megatron_utils.megatron_to_hf import convert_to_hf
from slime.backends.megatron_utils.named_params import named_params, partition_dim
from slime.backends.megatron_utils.weight_rules import rule_for
from slime.training.backend import NamedTensors


@dataclass(frozen=True)
class ParamInfo:
    """A parameter of some pipeline stage, as every rank knows it.

    ``shape`` is one rank's shard; ``dim`` the sharded dimension, None if all ranks hold the same values.
    """

    name: str
    stage: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None

    def full_bytes(self, tensor_parallel_size: int) -> int:
        shards = tensor_parallel_size if self.dim is not None else 1
        return shards * self.dtype.itemsize * torch.Size(self.shape).numel()


class HfWeights:
    """Gathers the parameters over the tensor- and pipeline-parallel groups, bucket by bucket.

    Every rank of a model-parallel group (``ranks``) must iterate, in step with the others, and every one of
    them gets every full tensor. Data-parallel replicas are independent of each other.

    Tensors of a bucket may be views of the parameters: use them before the next optimizer step, and do not
    write to them.
    """

    def __init__(self, args: Namespace, model: Sequence[torch.nn.Module]) -> None:
        self._args = args
        self.ranks = frozenset(dist.get_process_group_ranks(mpu.get_model_parallel_group()))
        self._params = {name: param for name, param in named_params(model) if has_hf_tensors(args, name)}
        self._infos = self._all_infos()

    def buckets(self, max_bytes: int) -> Iterator[NamedTensors]:
        """Lists of (HF name, tensor) of at most ``max_bytes`` each; a larger parameter comes alone."""
        for bucket in self._pack(max_bytes):
            yield self._gather(bucket)

    def _all_infos(self) -> list[ParamInfo]:
        """The parameters of all pipeline stages in order, identical on every rank."""
        stage = mpu.get_pipeline_model_parallel_rank()
        local = [
            ParamInfo(name, stage, tuple(param.shape), param.dtype, partition_dim(param))
            for name, param in self._params.items()
        ]
        stages: list[list[ParamInfo]] = [local] * mpu.get_pipeline_model_parallel_world_size()
        if len(stages) > 1:
            dist.all_gather_object(stages, local, group=mpu.get_pipeline_model_parallel_group())
        return list(chain.from_iterable(stages))

    def _pack(self, max_bytes: int) -> Iterator[list[ParamInfo]]:
        size = mpu.get_tensor_model_parallel_world_size()
        bucket: list[ParamInfo] = []
        used = 0
        for info in self._infos:
            needed = info.full_bytes(size)
            if bucket and used + needed > max_bytes:
                yield bucket
                bucket, used = [], 0
            bucket.append(info)
            used += needed
        if bucket:
            yield bucket

    @torch.no_grad()
    def _gather(self, bucket: list[ParamInfo]) -> NamedTensors:
        # Shards cross pipeline stages before they are joined: that moves 1 / TP of the bytes.
        shards = self._broadcast_over_stages(bucket)
        fulls = self._join_shards(bucket, shards)
        return [
            pair
            for info, full in zip(bucket, fulls, strict=True)
            for pair in convert_to_hf(self._args, info.name, full)
        ]

    def _broadcast_over_stages(self, bucket: list[ParamInfo]) -> list[torch.Tensor]:
        group = mpu.get_pipeline_model_parallel_group()
        own_stage = mpu.get_pipeline_model_parallel_rank()
        device = next(iter(self._params.values())).device
        shards, waiting = [], []
        for info in bucket:
            if info.stage == own_stage:
                shard = self._params[info.name].data
            else:
                shard = torch.empty(info.shape, dtype=info.dtype, device=device)
            shards.append(shard)
            if group.size() > 1:
                source = dist.get_global_rank(group, info.stage)
                waiting.append(dist.broadcast(shard, source, group=group, async_op=True))
        _wait_all(waiting)
        return shards

    def _join_shards(self, bucket: list[ParamInfo], shards: list[torch.Tensor]) -> list[torch.Tensor]:
        group = mpu.get_tensor_model_parallel_group()
        gathered: dict[str, torch.Tensor] = {}
        waiting = []
        for info, shard in zip(bucket, shards, strict=True):
            if info.dim is not None:
                out = shard.new_empty(group.size() * shard.size(0), *shard.shape[1:])
                gathered[info.name] = out
                waiting.append(
                    dist.all_gather_into_tensor(out, shard.contiguous(), group=group, async_op=True)
                )
        _wait_all(waiting)
        return [
            shard
            if info.dim is None
            else rule_for(info.name).unshard(list(gathered[info.name].chunk(group.size())), info.dim)
            for info, shard in zip(bucket, shards, strict=True)
        ]


def has_hf_tensors(args: Namespace, name: str) -> bool:
    """Whether a parameter has HF tensors of its own: the last stage's copy of a tied embedding has none."""
    return name != "output_layer.weight" or args.untie_embeddings_and_output_weights


def _wait_all(works: list[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()
