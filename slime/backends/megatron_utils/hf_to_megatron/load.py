"""Hugging Face checkpoint -> parameters of this rank."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core import parallel_state as mpu

from slime.backends.megatron_utils.hf_to_megatron.reader import SafetensorReader
from slime.backends.megatron_utils.named_params import named_params, partition_dim
from slime.backends.megatron_utils.weight_rules import hf_names, rule_for
from slime.utils.hf_config import SUPPORTED_MODEL_TYPES, HfConfigError, read_hf_config


def supports_hf_weight_loading(path: str | Path) -> bool:
    """Whether ``path`` is a Hugging Face checkpoint of a supported model type, with safetensors files."""
    try:
        config = read_hf_config(path)
    except HfConfigError:
        return False
    return config.get("model_type") in SUPPORTED_MODEL_TYPES and any(Path(path).glob("*.safetensors"))


@torch.no_grad()
def load_hf_weights(args: Namespace, model: Sequence[torch.nn.Module], path: str | Path) -> None:
    """Fills every parameter of this rank, converting to the parameter's dtype.

    The caller copies the new values into the optimizer's float32 weights (``reload_model_params``).

    Raises:
        ValueError: a tensor is missing, is left over, or has another shape than the model wants.
    """
    with SafetensorReader(path) as reader:
        _refuse_leftovers(args, reader)
        for name, param in named_params(model):
            param.copy_(_local_value(args, reader, name, param))


def _local_value(
    args: Namespace, reader: SafetensorReader, name: str, param: torch.nn.Parameter
) -> torch.Tensor:
    rule = rule_for(name)
    if name == "output_layer.weight" and not args.untie_embeddings_and_output_weights:
        # The last pipeline stage's copy of the tied embedding.
        rule = rule_for("embedding.word_embeddings.weight")
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


def _refuse_leftovers(args: Namespace, reader: SafetensorReader) -> None:
    """A checkpoint with tensors that the model has no place for is another model than its config says."""
    ignored = {name for name in reader.names() if name.endswith("rotary_emb.inv_freq")}
    if not args.untie_embeddings_and_output_weights:
        ignored.add("lm_head.weight")
    leftovers = sorted(reader.names() - hf_names(args) - ignored)
    if leftovers:
        shown = ", ".join(leftovers[:5]) + (", ..." if len(leftovers) > 5 else "")
        raise ValueError(f"{reader.path}: {len(leftovers)} tensors that the model does not have: {shown}")
