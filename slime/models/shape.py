"""A model as its family describes it, and what of that a trainer is told."""

from dataclasses import dataclass, fields
from typing import Any

from slime.config.model import PARTS, DecoderShape, ModelParts
from slime.models.hf_config import HfConfig
from slime.models.rope import Rope

Sizes = tuple[int, ...]
"""The shape of a tensor."""


@dataclass(frozen=True, kw_only=True)
class ModelShape(DecoderShape, ModelParts):
    """A decoder, with its rotary embedding and what few have.

    Layers with a window are rotated by ``local_rope``, if there is one. No trainer computes
    ``add_output_bias`` and ``add_mlp_bias``.
    """

    rope: Rope
    add_output_bias: bool
    add_mlp_bias: bool
    local_rope: Rope | None = None


def trained_shape(shape: ModelShape, config: HfConfig) -> dict[str, Any]:
    """The shape as flags of the trainer.

    Raises:
        HfConfigError: the trainer would compute something else than the model does.
    """
    config.require(attention_dropout=0.0)
    for name, switch in (("attention_bias", shape.add_output_bias), ("mlp_bias", shape.add_mlp_bias)):
        if switch:
            raise config.unsupported(name, True, False)
    values = {field.name: getattr(shape, field.name) for field in fields(DecoderShape)}
    values |= vars(shape.moe) if shape.moe else {}
    for name, (_, kind) in PARTS.items():
        part = getattr(shape, name)
        values |= vars(part) if part else dict.fromkeys(field.name for field in fields(kind))
    return {
        **values,
        "rope": shape.rope,
        "local_rope": shape.local_rope,
        "multi_latent_attention": shape.latent is not None,
        "swiglu": shape.activation == "silu",
        "quick_geglu": shape.activation == "quick_gelu",
        "layernorm_epsilon": shape.norm_epsilon,
        "rotary_base": shape.rope.base,
        "rope_type": "yarn" if shape.rope.kind == "yarn" else "rope",
        "rotary_percent": shape.rope.percent,
        "rotary_interleaved": shape.rope.interleaved,
        "use_rope_scaling": shape.rope.kind == "llama3",
        "rope_scaling_factor": shape.rope.factor("factor") or 8.0,
        "mscale": shape.rope.factor("mscale"),
        "mscale_all_dim": shape.rope.factor("mscale_all_dim"),
    }


def pad_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel_size: int) -> int:
    """``vocab_size`` rounded up to a multiple of ``divisible_by * tensor_parallel_size``."""
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple
