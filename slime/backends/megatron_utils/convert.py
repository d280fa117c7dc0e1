"""Weights from a Hugging Face directory to megatron-core's ``torch_dist`` format and back, without a run.

Both directions build the trainer's model and go through the code with which it loads and saves, so that
there is one table of names. One process on a CPU suffices; under torchrun the model is spread over several.
"""

import os
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from slime.arguments.views import ModelView, view
from slime.backends.megatron_utils.checkpoint import is_megatron_checkpoint, load_model_only, model_state
from slime.backends.megatron_utils.hf_checkpoint_saver import save_hf_model_to_path
from slime.backends.megatron_utils.hf_weights import load_hf_weights
from slime.backends.megatron_utils.initialize import init
from slime.backends.megatron_utils.model_provider import get_model
from slime.backends.megatron_utils.step import TrainState
from slime.training.checkpoint_dir import RELEASE, find_checkpoint, fresh_directory, on_first_rank, publish
from slime.utils.accelerator import process_group_backend


def write_torch_dist(args: Namespace, root: str | Path) -> Path:
    """Collective. Writes the weights of ``args.hf_checkpoint``; returns the directory ``root/release``.

    As of a checkpoint, nothing is to be seen of it before it is complete.
    """
    state = _model(args)
    load_hf_weights(view(args, ModelView), state.model, args.hf_checkpoint)
    final, temporary = Path(root) / RELEASE, Path(root) / f"{RELEASE}.tmp"
    on_first_rank(lambda: fresh_directory(temporary))
    dist_checkpointing.save({"model": model_state(state)}, str(temporary))
    on_first_rank(lambda: publish(temporary, final, RELEASE))
    return final


def write_hf(args: Namespace, source: str | Path, target: str | Path, shard_bytes: int) -> None:
    """Collective. Writes the weights of the checkpoint ``source`` as a Hugging Face directory.

    Config and tokenizer are those of ``args.hf_checkpoint``, the number format is ``args.params_dtype``.
    """
    state = _model(args)
    load_model_only(state, source)
    save_hf_model_to_path(args, target, state.model, shard_bytes)


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


def _model(args: Namespace) -> TrainState:
    """The model of this process, bare; there is no optimizer to it."""
    if "RANK" not in os.environ and not dist.is_initialized():
        dist.init_process_group(process_group_backend(), store=dist.HashStore(), rank=0, world_size=1)
    init(args)
    return cast(TrainState, SimpleNamespace(model=get_model(args)))
