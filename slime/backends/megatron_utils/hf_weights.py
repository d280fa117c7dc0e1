"""Hugging Face tensors into this rank's parameters, and the whole model as buckets of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from slime.arguments.views import ModelView
from slime.backends.megatron_utils.named_params import named_params, partition_dim
from slime.backends.megatron_utils.value_head import is_of_value_head
from slime.models import FAMILIES, HfConfigError, family_of
from slime.models.hf_config import read_hf_config
from slime.models.safetensors_dir import SafetensorReader
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

    def __init__(self, args: ModelView, model: Sequence[torch.nn.Module]) -> None:
        self._args = args
        self.ranks = frozenset(dist.get_process_group_ranks(mpu.get_model_parallel_group()))
        self._rules = family_of(args.model_type).weights
        absent = self._rules.absent(args)
        self._params = {name: param for name, param in named_params(model) if name not in absent}
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
            for pair in self._rules.split(self._args, info.name, full)
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
            else self._rules.rule_for(info.name).unshard(
                list(gathered[info.name].chunk(group.size())), info.dim
            )
            for info, shard in zip(bucket, shards, strict=True)
        ]


def _wait_all(works: list[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def is_hf_checkpoint(path: str | Path) -> bool:
    """Whether ``path`` is a Hugging Face checkpoint of a known family, with safetensors files."""
    try:
        config = read_hf_config(path)
    except HfConfigError:
        return False
    return config.get("model_type") in FAMILIES and any(Path(path).glob("*.safetensors"))


@torch.no_grad()
def load_hf_weights(args: ModelView, model: Sequence[torch.nn.Module], path: str | Path) -> None:
    """Fills every parameter of this rank but a value head's, converting to the parameter's dtype.

    The caller copies the new values into the optimizer's float32 weights (``reload_model_params``).

    Raises:
        ValueError: a tensor is missing, is left over, or has another shape than the model wants.
    """
    with SafetensorReader(path) as reader:
        _refuse_leftovers(args, reader)
        for name, param in named_params(model):
            if not is_of_value_head(param):
                param.copy_(_local_value(args, reader, name, param))


def _local_value(
    args: ModelView, reader: SafetensorReader, name: str, param: torch.nn.Parameter
) -> torch.Tensor:
    weights = family_of(args.model_type).weights
    if name in weights.absent(args):
        # The last pipeline stage's copy of the tied embedding.
        name = "embedding.word_embeddings.weight"
    rule = weights.rule_for(name)
    tensors = [reader.read(hf_name) for hf_name in rule.hf_names]
    value = rule.merge(tensors, args)
    dim = partition_dim(param)
    if dim is not None:
        rank, size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
        value = rule.shard(value, dim, rank, size)
    if value.shape != param.shape:
        found = ", ".join(f"{n} {list(t.shape)}" for n, t in zip(rule.hf_names, tensors, strict=True))
        raise ValueError(
            f"{reader.path}: {found} give {list(value.shape)} for {name}, wanted {list(param.shape)}"
        )
    return value


def _refuse_leftovers(args: ModelView, reader: SafetensorReader) -> None:
    """A checkpoint with tensors that the model has no place for is another model than its config says."""
    names, wanted = set(reader.names()), family_of(args.model_type).weights.hf_names(args)
    ignored = {name for name in names if name.endswith("rotary_emb.inv_freq")}
    if not args.untie_embeddings_and_output_weights:
        ignored.add("lm_head.weight")
    leftovers = sorted(names - wanted - ignored)
    if leftovers:
        shown = ", ".join(leftovers[:5]) + (", ..." if len(leftovers) > 5 else "")
        raise ValueError(f"{reader.path}: {len(leftovers)} tensors that the model does not have: {shown}")
