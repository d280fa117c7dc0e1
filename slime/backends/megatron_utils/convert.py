"""Weights from a Hugging Face directory to megatron-core's ``torch_dist`` format and back, without a run.

Both directions build the trainer's model, without memory for it, and go through the code with which it
loads and saves, so that there is one table of names. A parameter after the other goes through memory. One
process on a CPU suffices; under torchrun the model is spread over several.
"""

import ctypes
import os
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from slime.backends.megatron_utils.checkpoint import is_megatron_checkpoint
from slime.backends.megatron_utils.foreign_checkpoint import layer_naming
from slime.backends.megatron_utils.initialize import init
from slime.backends.megatron_utils.leftovers import refuse_leftovers
from slime.backends.megatron_utils.sharded_state import model_state
from slime.backends.megatron_utils.step import TrainState
from slime.backends.megatron_utils.streaming import HfSource, StoredHfWeights, StreamedSave, empty_model
from slime.backends.megatron_utils.value_head import without_foreign_head
from slime.config.backend import BackendConfig
from slime.config.hf_checkpoint import HfCheckpointConfig
from slime.config.model import ModelConfig
from slime.config.mtp import MtpConfig
from slime.config.run import filled
from slime.models import family_of
from slime.models.checkpoint.weights_dir import WeightsReader
from slime.models.mtp import trained_mtp_layers
from slime.training.checkpoint_dir import RELEASE, find_checkpoint, fresh_directory, on_first_rank, publish
from slime.training.hf_export import ExportBase, save_hf_model_to_path
from slime.utils.accelerator import process_group_backend

_M_MMAP_THRESHOLD = -3  # of malloc.h


def write_torch_dist(args: Namespace, root: str | Path) -> Path:
    """Collective. Writes the weights of ``args.hf_checkpoint``; returns the directory ``root/release``.

    As of a checkpoint, nothing is to be seen of it before it is complete.
    """
    state = _model(args)
    final, temporary = Path(root) / RELEASE, Path(root) / f"{RELEASE}.tmp"
    with WeightsReader(filled(HfCheckpointConfig, args).hf_checkpoint) as reader:
        config = filled(ModelConfig, args)
        _require_whole(config, trained_mtp_layers(filled(MtpConfig, args)), reader)
        source = HfSource(config, state.model, reader)
        on_first_rank(lambda: fresh_directory(temporary))
        dist_checkpointing.save({"model": model_state(state)}, str(temporary), StreamedSave(source))
    on_first_rank(lambda: publish(temporary, final, RELEASE))
    return final


def write_hf(args: Namespace, source: str | Path, target: str | Path, shard_bytes: int) -> None:
    """Collective. Writes the weights of the checkpoint ``source`` as a Hugging Face directory.

    Config and tokenizer are those of ``args.hf_checkpoint``, the number format is ``args.params_dtype``.
    """
    state = _model(args)
    stored = without_foreign_head(model_state(state, layer_naming(source)), source)
    weights = StoredHfWeights(filled(ModelConfig, args), state.model, stored, source)
    base = ExportBase.of(filled(BackendConfig, args, thin=True))
    save_hf_model_to_path(base, target, weights, shard_bytes)


def _require_whole(config: ModelConfig, mtp_layers: int, reader: WeightsReader) -> None:
    """Raises ValueError before anything is written if tensors are missing, or left over."""
    refuse_leftovers(config, reader)
    wanted = family_of(config.model_type).weights.hf_names(config, mtp_layers)
    if missing := sorted(wanted - set(reader.names())):
        raise ValueError(f"{reader.path}: {len(missing)} tensors are missing, e.g. {missing[0]}")


def find_weights(path: str | Path) -> Path:
    """The directory of weights that ``path`` is, or that the marker in it names.

    Raises:
        FileNotFoundError: there is none, or it is incomplete.
    """
    if is_megatron_checkpoint(path):
        return find_checkpoint(path)[1]
    if not (Path(path) / "metadata.json").is_file():
        raise FileNotFoundError(f"{path}: no torch_dist checkpoint, or an incomplete one")
    return Path(path)


def dtype_of(path: str | Path) -> torch.dtype:
    """The number format of the weights in a checkpoint directory."""
    tensors = dist_checkpointing.load_tensors_metadata(str(path))
    return next(tensor.dtype for name, tensor in tensors.items() if name.endswith("embeddings.weight"))


def _give_back_freed_memory() -> None:
    """Large blocks go back to the system when they are freed.

    glibc would keep them once the first ones were freed, and not use aligned ones again, which tensors are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 256 * 1024)


def _model(args: Namespace) -> TrainState:
    """The model of this process, without storage; there is no optimizer to it."""
    if "RANK" not in os.environ and not dist.is_initialized():
        dist.init_process_group(process_group_backend(), store=dist.HashStore(), rank=0, world_size=1)
    _give_back_freed_memory()
    init(filled(BackendConfig, args, thin=True))  # it is no run: what follows from flags of one is not there
    return cast(TrainState, SimpleNamespace(model=empty_model(args)))
