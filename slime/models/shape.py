"""The sizes and switches of a model, under Megatron-LM's names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.models.hf_config import HfConfig, HfConfigError


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. ``llama3`` holds the factors of Llama 3's scaling of frequencies, or is None."""

    base: float
    llama3: Mapping[str, float] | None = None


@dataclass(frozen=True)
class MoeShape:
    """The layers whose MLP is a mixture of experts.

    ``moe_layer_freq`` has a 1 for each such layer and a 0 for each dense one. With ``moe_router_pre_softmax``
    the weights of the chosen experts are their share of all experts, else they sum up to 1.
    """

    num_experts: int
    moe_router_topk: int
    moe_ffn_hidden_size: int
    moe_layer_freq: tuple[int, ...]
    moe_router_pre_softmax: bool


@dataclass(frozen=True)
class ModelShape:
    """A decoder. ``kv_channels`` is the size of a head, ``num_query_groups`` counts key/value heads."""

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    norm_epsilon: float
    vocab_size: int
    max_position_embeddings: int
    untie_embeddings_and_output_weights: bool
    rope: Rope
    qk_layernorm: bool = False
    add_qkv_bias: bool = False
    add_output_bias: bool = False
    add_mlp_bias: bool = False
    moe: MoeShape | None = None


@dataclass(frozen=True)
class ShapeArgs:
    """What weights and FLOPs read of ``args``: a shape, and the padded size of its vocabulary.

    The four about experts are 0 for dense models; see `MoeShape`.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    padded_vocab_size: int
    untie_embeddings_and_output_weights: bool
    qk_layernorm: bool
    add_qkv_bias: bool
    num_experts: int
    moe_router_topk: int
    moe_ffn_hidden_size: int
    moe_layer_freq: Sequence[int]


# What megatron-core's llama-3 RoPE scaling hard-codes (rotary_pos_embedding.py, `_apply_scaling`).
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def trained_shape(shape: ModelShape, config: HfConfig) -> dict[str, Any]:
    """The shape as flags of the trainer.

    Raises:
        HfConfigError: the trainer would compute something else than the model does.
    """
    config.require(attention_dropout=0.0)
    for name, switch in (("attention_bias", shape.add_output_bias), ("mlp_bias", shape.add_mlp_bias)):
        if switch:
            raise config.unsupported(name, True, False)
    if config.get("quantization_config"):
        raise HfConfigError(
            f"{config.origin}: quantization_config is not supported (wanted: unquantised weights)"
        )
    factors = shape.rope.llama3 or {}
    for name, value in _LLAMA3_ROPE.items():
        if factors.get(name, value) != value:
            raise HfConfigError(
                f"{config.origin}: RoPE {name} {factors[name]!r} is not supported (wanted: {value})"
            )
    values = {name: value for name, value in vars(shape).items() if name not in _NOT_FLAGS}
    return {
        **values,
        **(vars(shape.moe) if shape.moe else {}),
        "layernorm_epsilon": shape.norm_epsilon,
        "rotary_base": shape.rope.base,
        "use_rope_scaling": shape.rope.llama3 is not None,
        "rope_scaling_factor": factors.get("factor", 8.0),
    }


_NOT_FLAGS = frozenset({"rope", "add_output_bias", "add_mlp_bias", "moe"})


def pad_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel_size: int) -> int:
    """``vocab_size`` rounded up to a multiple of ``divisible_by * tensor_parallel_size``."""
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple
