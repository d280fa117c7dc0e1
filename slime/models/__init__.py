"""Model families: what trainer, weight sync, export and the embedded engine know about an architecture.

A family is one file here and one line in `FAMILIES`.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from slime.models import (
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    gemma3_text,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    glm_moe_dsa,
    gpt_oss,
    llama,
    mimo,
    minimax_m2,
    mixtral,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
)
from slime.models.any_decoder import shape_of_any
from slime.models.family import Family
from slime.models.flops import decoder_forward_flops
from slime.models.hf_config import HfConfig, HfConfigError
from slime.models.quantization import read_quantization
from slime.models.shape import ModelShape, ShapeArgs, trained_shape

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

FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "qwen2_moe": qwen2_moe.FAMILY,
    "glm4": glm4.FAMILY,
    "mimo": mimo.FAMILY,
    "gemma3_text": gemma3_text.FAMILY,
    "gemma3": gemma3_text.WITH_IMAGES,
    "glm4_moe": glm4_moe.FAMILY,
    "mixtral": mixtral.FAMILY,
    "minimax_m2": minimax_m2.FAMILY,
    "deepseek_v3": deepseek_v3.FAMILY,
    "kimi_k2": deepseek_v3.KIMI_K2,
    "deepseek_v32": deepseek_v32.FAMILY,
    "glm_moe_dsa": glm_moe_dsa.FAMILY,
    "glm4_moe_lite": glm4_moe_lite.FAMILY,
    "deepseek_v2": deepseek_v2.FAMILY,
    "qwen3_next": qwen3_next.FAMILY,
    "qwen3_5_text": qwen3_5.FAMILY,
    "qwen3_5_moe_text": qwen3_5.MOE_FAMILY,
    "qwen3_5": qwen3_5.WITH_IMAGES,
    "qwen3_5_moe": qwen3_5.MOE_WITH_IMAGES,
    "gpt_oss": gpt_oss.FAMILY,
}
"""By the ``model_type`` of config.json."""


def family_of(model_type: Any, origin: str = "config.json") -> Family:
    """The family of a ``model_type``.

    Raises:
        HfConfigError: no family has that type.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        wanted = ", ".join(FAMILIES)
        raise HfConfigError(f"{origin}: model_type {model_type!r} is not supported (wanted: {wanted})")
    return FAMILIES[model_type]


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


def calculate_fwd_flops(seqlens: Sequence[int], args: ShapeArgs) -> float:
    """FLOPs of a forward pass over sequences of these lengths; without a family those of a dense decoder.

    Plug-ins may have no more than sizes: ``hidden_size``, ``num_layers``, heads, ``ffn_hidden_size`` and
    ``vocab_size``.
    """
    if not hasattr(args, "model_type"):
        size = getattr(args, "kv_channels", None) or args.hidden_size // args.num_attention_heads
        sizes = vars(args) | {"kv_channels": size, "padded_vocab_size": args.vocab_size}
        return decoder_forward_flops(seqlens, cast(ShapeArgs, Namespace(**sizes)))
    family = FAMILIES.get(args.model_type)
    return (family.forward_flops if family else decoder_forward_flops)(seqlens, args)
