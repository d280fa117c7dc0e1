"""Qwen2 with mixtures of experts: each has a shared expert beside them, weighed by a gate."""

from dataclasses import replace

from slime.models.decoder import DECODER_WEIGHTS, decoder_shape
from slime.models.experts import (
    QWEN_EXPERTS,
    shared_expert_rules,
    shared_forward_flops,
    softmax_experts,
    sparse_layers,
)
from slime.models.family import Family
from slime.models.hf_config import HfConfig
from slime.models.rules import Rule
from slime.models.shape import ModelShape


def _shape(config: HfConfig) -> ModelShape:
    config.require(qkv_bias=True)
    shape = decoder_shape(config, add_qkv_bias=True, add_output_bias=False)
    layers, sums_to_one = sparse_layers(config, shape.num_layers), config.switch("norm_topk_prob")
    moe = softmax_experts(config, config.size("moe_intermediate_size"), sums_to_one, layers)
    shared = config.size("shared_expert_intermediate_size")
    moe = replace(moe, moe_shared_expert_intermediate_size=shared, moe_shared_expert_gate=True)
    return replace(shape, moe=moe)


_SHARED = {
    **shared_expert_rules("mlp.shared_expert"),
    "mlp.shared_experts.gate_weight": Rule(("mlp.shared_expert_gate.weight",)),
}
_EXPERTS = replace(QWEN_EXPERTS, of_layer={**QWEN_EXPERTS.of_layer, **_SHARED})

FAMILY = Family(
    shape=_shape,
    weights=replace(DECODER_WEIGHTS, experts=_EXPERTS),
    forward_flops=shared_forward_flops,
)
