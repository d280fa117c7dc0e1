"""Qwen3 with mixtures of experts: the dense model but for the MLPs of most layers."""

from dataclasses import replace
from functools import partial

from slime.models.decoder import DECODER_WEIGHTS
from slime.models.family import Family
from slime.models.flops import decoder_forward_flops, moe_products
from slime.models.hf_config import HfConfig
from slime.models.qwen3 import qwen3_shape
from slime.models.rules import ExpertRules, GateUpRule, Rule
from slime.models.shape import ModelShape, MoeShape


def _shape(config: HfConfig) -> ModelShape:
    shape = qwen3_shape(config)
    experts = config.size(_first_of(config, "num_experts", "num_local_experts"))
    chosen = config.size("num_experts_per_tok", at_most=experts)
    sums_to_one = config.switch("norm_topk_prob")
    if chosen == 1 and sums_to_one:
        # The weight of the only expert would be 1, and the router would learn nothing.
        raise config.unsupported("norm_topk_prob", True, False)
    moe = MoeShape(
        num_experts=experts,
        moe_router_topk=chosen,
        moe_ffn_hidden_size=config.size("moe_intermediate_size"),
        moe_layer_freq=_layers(config, shape.num_layers),
        moe_router_pre_softmax=not sums_to_one,
    )
    return replace(shape, moe=moe)


def _first_of(config: HfConfig, *names: str) -> str:
    """The name of a field that transformers 4 and 5 write under different ones."""
    return next((name for name in names if config.get(name) is not None), names[0])


def _layers(config: HfConfig, num_layers: int) -> tuple[int, ...]:
    """1 for layers with experts: every ``decoder_sparse_step``-th one that ``mlp_only_layers`` leaves out."""
    step, dense = config.size("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise config.wrong("mlp_only_layers", dense, "a list of layers")
    kinds = tuple(int(layer not in dense and (layer + 1) % step == 0) for layer in range(num_layers))
    if not any(kinds):
        raise config.wrong("decoder_sparse_step", step, "at least one layer with experts")
    return kinds


_EXPERTS = ExpertRules(
    of_layer={"mlp.router.weight": Rule(("mlp.gate.weight",))},
    of_expert={
        "linear_fc1.weight": GateUpRule(("gate_proj.weight", "up_proj.weight")),
        "linear_fc2.weight": Rule(("down_proj.weight",)),
    },
    prefix="mlp.experts.{}.",
)

FAMILY = Family(
    shape=_shape,
    weights=replace(DECODER_WEIGHTS, experts=_EXPERTS),
    forward_flops=partial(decoder_forward_flops, mlp=moe_products),
)
