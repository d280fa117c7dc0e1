"""What families with mixtures of experts have in common: names in config.json, and rules of weights."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from slime.config.model import ModelConfig, MoeShape
from slime.models.flops import decoder_forward_flops, moe_products
from slime.models.hf_config import HfConfig, HfConfigError
from slime.models.rules import ExpertRules, GateUpRule, Rule
from slime.models.shape import ModelShape


def first_of(config: HfConfig, *names: str) -> str:
    """The name of a field that transformers 4 and 5 write under different ones."""
    return next((name for name in names if config.get(name) is not None), names[0])


def _count(config: HfConfig, *names: str) -> int:
    """Returns the number of experts, under one of these names.

    Raises:
        HfConfigError: none of them is there, or it is no count.
    """
    if all(config.get(name) is None for name in names):
        raise HfConfigError(f"{config.origin}: {' or '.join(names)}: missing")
    return config.size(first_of(config, *names))


def sparse_layers(config: HfConfig, num_layers: int) -> tuple[int, ...]:
    """1 for layers with experts: every ``decoder_sparse_step``-th one that ``mlp_only_layers`` leaves out."""
    step, dense = config.size("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise config.wrong("mlp_only_layers", dense, "a list of layers")
    kinds = tuple(int(layer not in dense and (layer + 1) % step == 0) for layer in range(num_layers))
    if not any(kinds):
        raise config.wrong("decoder_sparse_step", step, "at least one layer with experts")
    return kinds


def dense_first(config: HfConfig, num_layers: int, default: int) -> tuple[int, ...]:
    """The first ``first_k_dense_replace`` layers are dense, or as ``mlp_layer_types`` names them."""
    kinds = config.get("mlp_layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers or {*kinds} - {"dense", "sparse"}:
            raise config.wrong("mlp_layer_types", kinds, f"dense or sparse for each of {num_layers} layers")
        layers = tuple(int(kind == "sparse") for kind in kinds)
    else:
        found = config.get("first_k_dense_replace")
        dense = default if found is None else found
        if type(dense) is not int or not dense >= 0:
            raise config.wrong("first_k_dense_replace", dense, "a number of layers")
        layers = tuple(int(layer >= dense) for layer in range(num_layers))
    if not any(layers):
        name = first_of(config, "mlp_layer_types", "first_k_dense_replace")
        raise config.wrong(name, config.get(name), "at least one layer with experts")
    return layers


def softmax_experts(config: HfConfig, width: int, sums_to_one: bool, layers: tuple[int, ...]) -> MoeShape:
    """Experts that are weighed by the softmax of the router's logits."""
    experts = _count(config, "num_experts", "num_local_experts")
    chosen = config.size("num_experts_per_tok", at_most=experts)
    if chosen == 1 and sums_to_one:
        # The weight of the only expert would be 1, and the router would learn nothing.
        raise config.unsupported("norm_topk_prob", True, False)
    return MoeShape(
        num_experts=experts,
        moe_router_topk=chosen,
        moe_ffn_hidden_size=width,
        moe_layer_freq=layers,
        moe_router_pre_softmax=not sums_to_one,
    )


def sigmoid_experts(config: HfConfig, shape: ModelShape, default_dense: int) -> MoeShape:
    """Returns the experts of DeepSeek-V3 (section 2.1.2): sigmoids, biases of experts, groups, shared
    experts.
    """
    config.require(norm_topk_prob=True, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    experts = _count(config, "n_routed_experts", "num_local_experts")
    groups = config.size("n_group", at_most=experts)
    if experts % groups:
        raise config.wrong("n_group", groups, f"a divisor of n_routed_experts {experts}")
    chosen = config.size("num_experts_per_tok", at_most=experts)
    if chosen == 1:
        raise config.wrong("num_experts_per_tok", 1, "2 or more")
    width = config.size("moe_intermediate_size")
    return MoeShape(
        num_experts=experts,
        moe_router_topk=chosen,
        moe_ffn_hidden_size=width,
        moe_layer_freq=dense_first(config, shape.num_layers, default_dense),
        moe_router_pre_softmax=True,  # of no effect, but what launch scripts say
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_num_groups=groups,
        moe_router_group_topk=config.size("topk_group", at_most=groups),
        moe_router_topk_scaling_factor=config.number("routed_scaling_factor"),
        moe_shared_expert_intermediate_size=width * config.size("n_shared_experts", 1),
    )


def expert_rules(
    *, router: str, prefix: str, parts: tuple[str, str, str], of_layer: Mapping[str, Rule] | None = None
) -> ExpertRules:
    """Rules of the experts of a layer.

    Args:
        router: the HF name of the router.
        prefix: see `ExpertRules`.
        parts: of an expert, how its gate, up and down projections are called.
        of_layer: what else the layer has.
    """
    gate, up, down = (f"{name}.weight" for name in parts)
    return ExpertRules(
        of_layer={"mlp.router.weight": Rule((router,)), **(of_layer or {})},
        of_expert={"linear_fc1.weight": GateUpRule((gate, up)), "linear_fc2.weight": Rule((down,))},
        prefix=prefix,
    )


PARTS = ("gate_proj", "up_proj", "down_proj")


def shared_expert_rules(prefix: str) -> dict[str, Rule]:
    """Returns the rules of shared experts under ``prefix``."""
    gate, up, down = (f"{prefix}.{name}.weight" for name in PARTS)
    return {
        "mlp.shared_experts.linear_fc1.weight": GateUpRule((gate, up)),
        "mlp.shared_experts.linear_fc2.weight": Rule((down,)),
    }


QWEN_EXPERTS = expert_rules(router="mlp.gate.weight", prefix="mlp.experts.{}.", parts=PARTS)
DEEPSEEK_EXPERTS = replace(
    QWEN_EXPERTS,
    of_layer={
        **QWEN_EXPERTS.of_layer,
        "mlp.router.expert_bias": Rule(("mlp.gate.e_score_correction_bias",)),
        **shared_expert_rules("mlp.shared_experts"),
    },
)


def shared_products(shape: ModelConfig) -> int:
    """`moe_products`, and those of the shared experts."""
    shared = 3 * (shape.moe_shared_expert_intermediate_size or 0) * shape.hidden_size
    return moe_products(shape) + shared * sum(shape.moe_layer_freq)


def shared_forward_flops(seqlens: Sequence[int], shape: ModelConfig) -> float:
    """Counts the FLOPs of a decoder whose experts have shared ones beside them."""
    return decoder_forward_flops(seqlens, shape, shared_products)


moe_forward_flops = partial(decoder_forward_flops, mlp=moe_products)
