"""Weights that go between checkpoints parameter by parameter, so that a model may be larger than the memory.

The trainer's model is built without storage (torch's ``meta`` device). What megatron-core's checkpoints
hold of it are views of its parameters, found again by the storage that they would have.
"""

import copy
import gc
import queue
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemWriter, WriteResult
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.futures import Future

from slime.arguments.core.run_args import copied
from slime.backends.megatron_utils.foreign_checkpoint import split_objects
from slime.backends.megatron_utils.hf_weights import HfWeights, ParamInfo, fill_param
from slime.backends.megatron_utils.model_provider import get_model
from slime.backends.megatron_utils.named_params import named_weights
from slime.config.backend import BackendConfig
from slime.config.model import ModelConfig
from slime.config.run import filled
from slime.models.checkpoint.weights_dir import WeightsReader
from slime.training.checkpoint_errors import explained

# torch keeps what it writes to a file until the file is complete.
_FILE_BYTES = 256 * 1024**2


def empty_model(args: Namespace) -> list[torch.nn.Module]:
    """The model chunks of this rank, their parameters without storage."""
    # megatron-core then asks for no device of its own.
    flat = copied(args, use_cpu_initialization=True)
    return get_model(filled(BackendConfig, flat, thin=True), device=torch.device("meta"))


class _Named(NamedTuple):
    name: str
    param: torch.Tensor


def _by_storage(model: Sequence[torch.nn.Module]) -> dict[int, _Named]:
    return {_storage(param): _Named(name, param) for name, param in named_weights(model)}


def _storage(tensor: torch.Tensor) -> int:
    """What views of a tensor have in common, with or without memory."""
    return tensor.untyped_storage()._cdata


class HfSource:
    """Values of a model's parameters, read from a Hugging Face directory when they are asked for."""

    def __init__(self, args: ModelConfig, model: Sequence[torch.nn.Module], reader: WeightsReader) -> None:
        self._args, self._reader = args, reader
        self._params = _by_storage(model)
        self._last: tuple[str, torch.Tensor] | None = None

    @torch.no_grad()
    def value(self, view: torch.Tensor) -> torch.Tensor:
        """The values of a view of a parameter; neighbouring views of one are read together."""
        name, param = self._params[_storage(view)]
        if self._last is None or self._last[0] != name:
            self._last = None
            value = torch.empty(param.shape, dtype=param.dtype)
            fill_param(self._args, self._reader, name, value, like=param)
            self._last = name, value
        return self._last[1].as_strided(view.shape, view.stride(), view.storage_offset())


class _Planner(MCoreSavePlanner):
    """Reads a value when it is to be written."""

    def __init__(self, source: HfSource) -> None:
        super().__init__(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._source = source

    def resolve_data(self, write_item: WriteItem) -> Any:
        value = super().resolve_data(write_item)
        is_empty = isinstance(value, torch.Tensor) and value.is_meta
        return self._source.value(value) if is_empty else value


class _SmallFiles(FileSystemWriter):
    """Writes files of some size, or of one tensor where that is larger."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        files: queue.Queue[tuple[Any, str, list[WriteItem]]] = queue.Queue()
        for number, items in enumerate(_packed(plan.items)):
            name = f"{plan.storage_data.prefix}{number}{DEFAULT_SUFFIX}"
            files.put((self.fs.concat_path(self.path, name), name, items))
        return self._write_data(planner, files)


def _packed(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    packed: list[WriteItem] = []
    used = 0
    for item in items:
        data = item.tensor_data
        size = data.chunk.sizes.numel() * data.properties.dtype.itemsize if data is not None else 0
        if packed and used + size > _FILE_BYTES:
            yield packed
            packed, used = [], 0
        packed.append(item)
        used += size
    if packed:
        yield packed


class StreamedSave(TorchDistSaveShardedStrategy):
    """megatron-core's ``torch_dist`` format, each value being read when it is written."""

    def __init__(self, source: HfSource) -> None:
        super().__init__("torch_dist", 1)
        self._source = source

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path | str) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        writer = _SmallFiles(checkpoint_dir, thread_count=1)
        with explained(checkpoint_dir, "written", "space there, and leave to write"), _as_value_error():
            dcp.save(mcore_to_pyt_state_dict(state), storage_writer=writer, planner=_Planner(self._source))


@contextmanager
def _as_value_error() -> Iterator[None]:
    """Raises what is wrong with the source as what it was before torch collected it from all ranks."""
    try:
        yield
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            if isinstance(failure, ValueError):
                raise ValueError(str(failure)) from error
        raise


class StoredHfWeights(HfWeights):
    """`HfWeights` of a checkpoint in ``torch_dist`` format, of which it reads a bucket at a time.

    Args:
        model: without storage.
        state: its sharded state, as the checkpoint names things.
        path: the directory of the checkpoint.
    """

    def __init__(
        self,
        args: ModelConfig,
        model: Sequence[torch.nn.Module],
        state: Mapping[str, Any],
        path: str | Path,
    ) -> None:
        super().__init__(args, model)
        self._path = path
        self._reader = CachedMetadataFileSystemReader(path)
        names = _by_storage(model)
        self._stored = {
            names[_storage(value.data)].name: value
            for value in _entries(state)
            if isinstance(value, ShardedTensor | ShardedTensorFactory)
        }

    def _gather(
        self, bucket: list[ParamInfo], over_stages: bool
    ) -> list[tuple[str, int | None, torch.Tensor]]:
        own = mpu.get_pipeline_model_parallel_rank()
        self._params = {}  # not two buckets at a time
        self._params = self._read([info.name for info in bucket if info.stage == own])
        return super()._gather(bucket, over_stages)

    def _read(self, names: list[str]) -> dict[str, torch.Tensor]:
        """These parameters of this rank. Collective."""
        template: dict[str, Any] = {}
        for name in names:
            entry = copy.copy(self._stored[name])
            entry.data = torch.empty(entry.data.shape, dtype=entry.data.dtype)
            template[name] = entry
        factories = {name: e for name, e in template.items() if isinstance(e, ShardedTensorFactory)}
        apply_factories(template)
        with explained(self._path, "read", "a complete copy"):
            self._load(list(nested_values(template)))
        dict_list_map_inplace(lambda tensor: tensor.data, template)
        loaded = apply_factory_merges(template, factories)
        return {name: value.to(self._device) for name, value in loaded.items()}

    def _load(self, tensors: list[ShardedTensor]) -> None:
        """Into their data. Metadata are read once, which megatron-core's own loading would do each time."""
        by_key: dict[str, list[Any]] = defaultdict(list)
        for tensor in tensors:
            by_key[tensor.key].append(_of_full_rank(tensor))
        wanted = [tensor for group in by_key.values() for tensor in group]
        planner = MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[each for each in wanted if not each.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={e.key: e for e in wanted if e.allow_shape_mismatch},
        )
        dcp.load(mcore_to_pyt_state_dict(by_key, True), storage_reader=self._reader, planner=planner)
        # What torch and megatron-core made of them refers to itself, and would keep the data for long.
        gc.collect()


def _of_full_rank(tensor: ShardedTensor) -> ShardedTensor:
    """Returns the same data with an axis of size 1 for each that the checkpoint has before those of the
    parameter.

    In megatron-core's older form, with such axes apart, one process cannot load a part of a tensor.
    """
    shape = (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)
    return replace(tensor, data=tensor.data.view(shape), local_shape=shape, prepend_axis_num=0)


def _entries(state: Mapping[str, Any]) -> Iterator[Any]:
    """What a sharded state has for each name, of all model chunks."""
    tensors, _ = split_objects(dict(state))
    for value in tensors.values():
        yield from value.values() if isinstance(value, dict) else [value]
