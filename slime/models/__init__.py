"""Model families: what trainer, weight sync, export and the embedded engine know about an architecture.

A family is one file in `families` and one line in its `FAMILIES`; `checkpoint` reads and writes files.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from slime.config.model import ModelConfig
from slime.models.any_decoder import shape_of_any
from slime.models.checkpoint.quantization import read_quantization
from slime.models.families import FAMILIES, family_of
from slime.models.family import Family
from slime.models.flops import decoder_forward_flops
from slime.models.hf_config import HfConfig, HfConfigError
from slime.models.shape import ModelShape, trained_shape

__all__ = [
    "FAMILIES",
    "Family",
    "HfConfigError",
    "ModelShape",
    "calculate_fwd_flops",
    "family_of",
    "read_shape",
    "shape_from_hf_config",
    "shape_of_any",
]


def shape_from_hf_config(path: str | Path) -> dict[str, Any]:
    """The shape of a checkpoint directory as flags of the trainer, so that nobody has to give them.

    Raises:
        HfConfigError: see `read_shape`; or the trainer would compute something else than the model does.
    """
    return trained_shape(read_shape(path), HfConfig.read(path).text)


def read_shape(path: str | Path) -> ModelShape:
    """The shape that the ``config.json`` of a checkpoint directory describes.

    Raises:
        HfConfigError: the file cannot be read, or describes what its family does not compute, or weights that
            are quantised in a way that is not read.
    """
    config = HfConfig.read(path)
    read_quantization(config)
    return family_of(config.get("model_type"), config.origin).shape(config)


def calculate_fwd_flops(seqlens: Sequence[int], args: ModelConfig) -> float:
    """FLOPs of a forward pass over sequences of these lengths; without a family those of a dense decoder.

    Plug-ins may have no more than sizes: ``hidden_size``, ``num_layers``, heads, ``ffn_hidden_size`` and
    ``vocab_size``.
    """
    if not hasattr(args, "model_type"):
        size = getattr(args, "kv_channels", None) or args.hidden_size // args.num_attention_heads
        sizes = vars(args) | {"kv_channels": size, "padded_vocab_size": args.vocab_size}
        return decoder_forward_flops(seqlens, cast(ModelConfig, Namespace(**sizes)))
    family = FAMILIES.get(args.model_type)
    return (family.forward_flops if family else decoder_forward_flops)(seqlens, args)
