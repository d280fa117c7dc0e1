"""Mixtral: Llama with a mixture of experts in every layer."""

from dataclasses import replace

from slime.models.decoder import DECODER_WEIGHTS, decoder_shape
from slime.models.experts import expert_rules, moe_forward_flops, softmax_experts
from slime.models.family import Family, InSglang
from slime.models.hf_config import HfConfig
from slime.models.rope import read_rope
from slime.models.shape import ModelShape


def _shape(config: HfConfig) -> ModelShape:
    config = config.filled(num_key_value_heads=8, rms_norm_eps=1e-5)
    config.require(sliding_window=None, router_jitter_noise=0.0)
    shape = decoder_shape(config, rope=read_rope(config, base=1e6))
    experts = softmax_experts(config, shape.ffn_hidden_size, True, (1,) * shape.num_layers)
    return replace(shape, moe=experts)


_EXPERTS = expert_rules(
    router="block_sparse_moe.gate.weight", prefix="block_sparse_moe.experts.{}.", parts=("w1", "w3", "w2")
)

FAMILY = Family(
    shape=_shape,
    weights=replace(DECODER_WEIGHTS, experts=_EXPERTS),
    forward_flops=moe_forward_flops,
    in_sglang=InSglang(own_head=True),
)
