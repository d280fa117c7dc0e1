"""From a Hugging Face directory into the shards of all ranks."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from slime.backends.fsdp_utils.model import empty_model, plain_config
from slime.backends.fsdp_utils.optimizer import local
from slime.backends.fsdp_utils.value_head import is_of_value_head
from slime.models.weights_dir import WeightsReader


@torch.no_grad()
def load_hf_weights(args: Namespace, model: PreTrainedModel, path: str | Path) -> None:
    """Collective. Fills every parameter and buffer with those of the directory ``path``, but no value head.

    The first rank reads, through ``transformers``, which knows the names of every architecture, and gives the
    others their shards, tensor by tensor. Quantised weights are dequantised.

    Raises:
        ValueError: the directory cannot be read, a tensor is missing, is left over, or has another shape.
    """
    source = _read_on_first_rank(args, path)
    parameters = dict(source.named_parameters()) if source is not None else {}
    buffers = dict(source.named_buffers()) if source is not None else {}
    for name, param in model.named_parameters():
        if is_of_value_head(name):
            continue
        _fill(param, None if source is None else parameters[name])
    for name, buffer in model.named_buffers():
        if source is not None:
            buffer.copy_(buffers[name])
        dist.broadcast(buffer, src=0)


def _read_on_first_rank(args: Namespace, path: str | Path) -> PreTrainedModel | None:
    """The whole model on the host of the first rank, None elsewhere; a failure is one of all ranks."""
    model, failure = None, [""]
    if dist.get_rank() == 0:
        try:
            model = _read(args, path)
        except Exception as error:  # whatever the others wait for will not come
            failure = [str(error) or type(error).__name__]
    dist.broadcast_object_list(failure, src=0)
    if failure[0]:
        raise ValueError(f"{path}: {failure[0]}")
    return model


def _read(args: Namespace, path: str | Path) -> PreTrainedModel:
    transformers.logging.disable_progress_bar()
    options: dict[str, Any] = {
        "dtype": torch.float32,
        "attn_implementation": "eager",
        "ignore_mismatched_sizes": True,  # they are refused below, in words
        "output_loading_info": True,
    }
    with WeightsReader(path) as reader:
        if reader.quantization is None:
            options |= {"local_files_only": True, "use_safetensors": True}
            model, info = AutoModelForCausalLM.from_pretrained(
                path, trust_remote_code=args.trust_remote_code, **options
            )
        else:
            kind = type(empty_model(path, args.trust_remote_code))
            config = plain_config(path, args.trust_remote_code)
            weights = dict(reader.items())
            model, info = kind.from_pretrained(None, config=config, state_dict=weights, **options)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(str(key) for key in info[what])
        if names:
            shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise ValueError(f"{len(names)} {what.replace('_keys', '')} tensors: {shown}")
    return model


def _fill(param: torch.Tensor, value: torch.Tensor | None) -> None:
    """Gives each rank its part of ``value``, which the first rank has."""
    assert isinstance(param, DTensor)
    mesh = param.device_mesh
    whole = torch.empty(param.shape, dtype=param.dtype, device=mesh.device_type)
    if value is not None:
        whole.copy_(value)
    part = distribute_tensor(whole, mesh, param.placements)
    local(param).copy_(part.to_local())
