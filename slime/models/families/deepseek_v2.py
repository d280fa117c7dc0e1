"""DeepSeek-V2 and V2-Lite: the attention of DeepSeek-V3, experts that are weighed by a softmax."""

from dataclasses import replace

from slime.config.model import MoeShape
from slime.models.experts import DEEPSEEK_EXPERTS, dense_first, softmax_experts
from slime.models.families.deepseek_v3 import LATENT_WEIGHTS, latent_attention_shape, latent_moe_flops
from slime.models.family import Family
from slime.models.hf_config import HfConfig
from slime.models.shape import ModelShape

_GROUPED, _GREEDY = "group_limited_greedy", "greedy"


def _shape(config: HfConfig) -> ModelShape:
    shape = latent_attention_shape(config)
    return replace(shape, moe=_experts(config, shape))


def _experts(config: HfConfig, shape: ModelShape) -> MoeShape:
    """Returns the experts of DeepSeek-V2 (section 2.2.2): their weights are shares of all experts, times a
    factor.
    """
    config.require(norm_topk_prob=False, scoring_func="softmax", moe_layer_freq=1)
    method = config.get("topk_method", _GREEDY)
    if method not in (_GREEDY, _GROUPED):
        raise config.wrong("topk_method", method, f"{_GREEDY} or {_GROUPED}")
    experts, width = config.size("n_routed_experts"), config.size("moe_intermediate_size")
    groups = config.size("n_group", 1, at_most=experts) if method == _GROUPED else 1
    if experts % groups:
        raise config.wrong("n_group", groups, f"a divisor of n_routed_experts {experts}")
    named = HfConfig({**config.values, "num_experts": experts}, config.origin)
    moe = softmax_experts(named, width, sums_to_one=False, layers=dense_first(config, shape.num_layers, 0))
    return replace(
        moe,
        moe_router_num_groups=groups,
        moe_router_group_topk=config.size("topk_group", 1, at_most=groups) if groups > 1 else 1,
        moe_router_topk_scaling_factor=config.number("routed_scaling_factor", 1.0),
        moe_shared_expert_intermediate_size=width * config.size("n_shared_experts", 2),
    )


_OF_LAYER = {name: rule for name, rule in DEEPSEEK_EXPERTS.of_layer.items() if "expert_bias" not in name}

FAMILY = Family(
    shape=_shape,
    weights=replace(LATENT_WEIGHTS, experts=replace(DEEPSEEK_EXPERTS, of_layer=_OF_LAYER), mtp=None),
    forward_flops=latent_moe_flops,
)
