"""Qwen3.5: the layers of Qwen3-Next, their projections apart in the checkpoint; and a tower for images."""

from collections.abc import Sequence
from dataclasses import replace

from slime.config.model import ModelConfig
from slime.models.decoder import DECODER_WEIGHTS
from slime.models.families.qwen2_moe import GATED_SHARED_EXPERTS, gated_shared_experts
from slime.models.families.qwen3_next import hybrid_moe_flops, hybrid_shape, is_of_mtp
from slime.models.family import Family, nested_family
from slime.models.flops import dense_products
from slime.models.hf_config import HfConfig
from slime.models.linear_attention import (
    GATED_LAYER,
    ByKeyHead,
    delta_net_tensors,
    delta_nets,
    hybrid_flops,
)
from slime.models.rules import FusedGateUpRule, Rule
from slime.models.shape import ModelShape
from slime.models.weight_prefix import WeightPrefix


def _shape(config: HfConfig) -> ModelShape:
    return hybrid_shape(config.filled(num_key_value_heads=4))


def _moe_shape(config: HfConfig) -> ModelShape:
    # No layer is dense, and the weights of the chosen experts sum up to 1.
    fixed = {"norm_topk_prob": True, "intermediate_size": config.size("moe_intermediate_size")}
    config = replace(config, values={"num_key_value_heads": 2, **config.values, **fixed})
    shape = hybrid_shape(config)
    return replace(shape, moe=gated_shared_experts(config, (1,) * shape.num_layers))


def _dense_flops(seqlens: Sequence[int], shape: ModelConfig) -> float:
    return hybrid_flops(seqlens, shape, dense_products)


_IN_PROJ = ByKeyHead(
    tuple(f"in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
    ((0, 1, 2), (3,), (4,), (5,)),
    grouped=False,
)
_WEIGHTS = replace(DECODER_WEIGHTS, of_layer=GATED_LAYER, kinds=(delta_nets(_IN_PROJ),), untrained=is_of_mtp)

FAMILY = Family(
    shape=_shape,
    weights=_WEIGHTS,
    layer_spec="slime_plugins.models.qwen3_5.get_qwen3_5_spec",
    forward_flops=_dense_flops,
    own_tensors=delta_net_tensors,
    attention="linear attention",
)
MOE_FAMILY = replace(
    FAMILY,
    shape=_moe_shape,
    weights=replace(_WEIGHTS, experts=GATED_SHARED_EXPERTS),
    forward_flops=hybrid_moe_flops,
)

_PREFIX, _VISION = WeightPrefix("model.language_model."), ("model.visual.",)
# Published checkpoints have the experts of a layer in one tensor.
_STACKED = replace(
    GATED_SHARED_EXPERTS,
    of_expert={
        "linear_fc1.weight": FusedGateUpRule(("gate_up_proj",)),
        "linear_fc2.weight": Rule(("down_proj",)),
    },
    prefix="mlp.experts.",
    stacked=True,
)
WITH_IMAGES = nested_family(FAMILY, _PREFIX, _VISION)
MOE_WITH_IMAGES = nested_family(
    replace(MOE_FAMILY, weights=replace(MOE_FAMILY.weights, experts=_STACKED)), _PREFIX, _VISION
)
