"""Qwen3 with mixtures of experts: the dense model but for the MLPs of most layers."""

from dataclasses import replace

from slime.models.decoder import DECODER_WEIGHTS
from slime.models.experts import QWEN_EXPERTS, moe_forward_flops, softmax_experts, sparse_layers
from slime.models.families.qwen3 import qwen3_shape
from slime.models.family import Family, InSglang
from slime.models.hf_config import HfConfig
from slime.models.shape import ModelShape


def _shape(config: HfConfig) -> ModelShape:
    shape = qwen3_shape(config.filled(num_key_value_heads=4))
    layers, sums_to_one = sparse_layers(config, shape.num_layers), config.switch("norm_topk_prob")
    width = config.size("moe_intermediate_size")
    return replace(shape, moe=softmax_experts(config, width, sums_to_one, layers))


FAMILY = Family(
    shape=_shape,
    weights=replace(DECODER_WEIGHTS, experts=QWEN_EXPERTS),
    forward_flops=moe_forward_flops,
    like_llama=True,
    in_sglang=InSglang(own_head=True, all_sparse=True),
)
