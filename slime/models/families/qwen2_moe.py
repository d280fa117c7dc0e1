"""Qwen2 with mixtures of experts: each has a shared expert beside them, weighed by a gate."""

from dataclasses import replace

from slime.config.model import MoeShape
from slime.models.decoder import DECODER_WEIGHTS, decoder_shape
from slime.models.experts import (
    QWEN_EXPERTS,
    shared_expert_rules,
    shared_forward_flops,
    softmax_experts,
    sparse_layers,
)
from slime.models.family import Family, InSglang
from slime.models.hf_config import HfConfig
from slime.models.rules import Rule
from slime.models.shape import ModelShape


def gated_shared_experts(config: HfConfig, layers: tuple[int, ...]) -> MoeShape:
    """Experts with a shared one, whose gate weighs it, in the layers that are marked by a 1."""
    sums_to_one = config.switch("norm_topk_prob")
    moe = softmax_experts(config, config.size("moe_intermediate_size"), sums_to_one, layers)
    shared = config.size("shared_expert_intermediate_size")
    return replace(moe, moe_shared_expert_intermediate_size=shared, moe_shared_expert_gate=True)


def _shape(config: HfConfig) -> ModelShape:
    config.require(qkv_bias=True)
    shape = decoder_shape(config.filled(num_key_value_heads=16), add_qkv_bias=True, add_output_bias=False)
    return replace(shape, moe=gated_shared_experts(config, sparse_layers(config, shape.num_layers)))


_SHARED = {
    **shared_expert_rules("mlp.shared_expert"),
    "mlp.shared_experts.gate_weight": Rule(("mlp.shared_expert_gate.weight",)),
}
GATED_SHARED_EXPERTS = replace(QWEN_EXPERTS, of_layer={**QWEN_EXPERTS.of_layer, **_SHARED})

FAMILY = Family(
    shape=_shape,
    weights=replace(DECODER_WEIGHTS, experts=GATED_SHARED_EXPERTS),
    forward_flops=shared_forward_flops,
    in_sglang=InSglang(own_head=True, all_sparse=True),
)
