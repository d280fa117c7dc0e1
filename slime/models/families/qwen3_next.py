"""Qwen3-Next: gated delta nets in most layers, gated attention in the others, experts with a shared one."""

from collections.abc import Sequence
from dataclasses import replace

from slime.config.model import ModelConfig
from slime.models.decoder import DECODER_WEIGHTS, decoder_shape
from slime.models.experts import shared_products, sparse_layers
from slime.models.families.qwen2_moe import GATED_SHARED_EXPERTS, gated_shared_experts
from slime.models.family import Family, InSglang
from slime.models.hf_config import HfConfig
from slime.models.linear_attention import (
    GATED_LAYER,
    ByKeyHead,
    delta_net_tensors,
    delta_nets,
    hybrid_flops,
    linear_shape,
)
from slime.models.mtp import QWEN_MTP
from slime.models.rope import read_rope
from slime.models.shape import ModelShape

_HEAD_DIM, _ROTATED = 256, 0.25  # Qwen3NextConfig's defaults


def hybrid_shape(config: HfConfig) -> ModelShape:
    """The shape of a decoder with gated delta nets and gated attention, its MLPs left to the family."""
    shape = decoder_shape(
        config,
        rope=read_rope(config, percent=_ROTATED),
        kv_channels=config.size("head_dim", _HEAD_DIM),
        qk_layernorm=True,
        layernorm_zero_centered_gamma=True,
        attention_output_gate=True,
    )
    return replace(shape, linear=linear_shape(config, shape.num_layers))


def _shape(config: HfConfig) -> ModelShape:
    config = config.filled(num_key_value_heads=2, norm_topk_prob=True)
    shape = hybrid_shape(config)
    return replace(shape, moe=gated_shared_experts(config, sparse_layers(config, shape.num_layers)))


def hybrid_moe_flops(seqlens: Sequence[int], shape: ModelConfig) -> float:
    """Counts the FLOPs of a forward pass."""
    return hybrid_flops(seqlens, shape, shared_products)


_IN_PROJ = ByKeyHead(("in_proj_qkvz.weight", "in_proj_ba.weight"), ((0, 1, 2, 3), (4, 5)), grouped=True)


def is_of_mtp(name: str, num_layers: int) -> bool:
    """Whether a tensor belongs to the MTP layers."""
    del num_layers
    return name.startswith("mtp.")


FAMILY = Family(
    shape=_shape,
    weights=replace(
        DECODER_WEIGHTS,
        of_layer=GATED_LAYER,
        kinds=(delta_nets(_IN_PROJ),),
        experts=GATED_SHARED_EXPERTS,
        untrained=is_of_mtp,
        mtp=QWEN_MTP,
    ),
    layer_spec="slime_plugins.models.qwen3_next.get_qwen3_next_spec",
    forward_flops=hybrid_moe_flops,
    own_tensors=delta_net_tensors,
    attention="linear attention",
    in_sglang=InSglang(own_head=True, all_sparse=True),
)
