"""MiniMax-M2: norms of queries and keys over all heads, half of each head rotated, experts with biases."""

from dataclasses import replace

from slime.config.model import MoeShape
from slime.models.decoder import DECODER_WEIGHTS, decoder_shape
from slime.models.experts import expert_rules, moe_forward_flops
from slime.models.family import Family, InSglang
from slime.models.hf_config import HfConfig
from slime.models.rope import read_rope
from slime.models.rules import Rule
from slime.models.shape import ModelShape

_HEAD_DIM = 128  # MiniMaxM2Config's default


def _shape(config: HfConfig) -> ModelShape:
    config.require(router_jitter_noise=0.0, scoring_func="sigmoid", use_routing_bias=True)
    config.require(qk_norm_type="per_layer", use_qk_norm=True, shared_intermediate_size=0)
    head = config.size("head_dim", _HEAD_DIM)
    rotated = config.get("rotary_dim")
    percent = 1.0 if rotated is None else config.size("rotary_dim", at_most=head) / head
    shape = decoder_shape(
        config.filled(num_key_value_heads=8),
        rope=read_rope(config, percent=percent, base=5e6),
        kv_channels=head,
        qk_layernorm=True,
        qk_norm_over_heads=True,
    )
    experts = config.size("num_local_experts")
    moe = MoeShape(
        num_experts=experts,
        moe_router_topk=config.size("num_experts_per_tok", at_most=experts),
        moe_ffn_hidden_size=shape.ffn_hidden_size,
        moe_layer_freq=(1,) * shape.num_layers,
        moe_router_pre_softmax=True,  # of no effect, but what launch scripts say
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    )
    return replace(shape, moe=moe)


_EXPERTS = expert_rules(
    router="block_sparse_moe.gate.weight",
    prefix="block_sparse_moe.experts.{}.",
    parts=("w1", "w3", "w2"),
    of_layer={"mlp.router.expert_bias": Rule(("block_sparse_moe.e_score_correction_bias",))},
)

FAMILY = Family(
    shape=_shape,
    weights=replace(DECODER_WEIGHTS, experts=_EXPERTS),
    forward_flops=moe_forward_flops,
    in_sglang=InSglang(own_head=True),
)
