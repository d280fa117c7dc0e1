"""Mixtures of experts: how tokens find their experts, and how these are spread over processes."""

import ast
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from slime.arguments.core.errors import UsageError
from slime.arguments.core.flag import changed, flags_of, given
from slime.arguments.core.group import ConfigGroup
from slime.config.experts import ExpertConfig
from slime.config.model import MoeShape
from slime.config.trainers import trainer_of
from slime.models import HfConfigError, read_shape

_MAX_LAYERS = 100_000


def layer_kinds(text: str, num_layers: int) -> tuple[int, ...]:
    """Megatron-LM's notation of the layers with experts: 1 for each, 0 for a dense one.

    Raises:
        UsageError: no number, and no list of as many 0 and 1 as there are layers.
    """
    try:
        value = _evaluated(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        value = None
    if type(value) is int and value > 0:
        return tuple(int(layer % value == 0) for layer in range(num_layers))
    if isinstance(value, list) and len(value) == num_layers and all(kind in (0, 1) for kind in value):
        return tuple(value)
    raise UsageError(
        f"--moe-layer-freq {text}: wanted a number, or a list of a 0 or a 1 for each of {num_layers} layers"
    )


def _evaluated(node: ast.expr) -> Any:
    """Lists of numbers, their sums and their multiples."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.List(elts=elements):
            return [_evaluated(element) for element in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _list(_evaluated(left)) + _list(_evaluated(right))
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int(times))):
            repeated = _list(_evaluated(left))
            if len(repeated) * times <= _MAX_LAYERS:
                return repeated * times
    raise ValueError("neither a number nor a list")


def _list(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise ValueError("no list")
    return value


def notes(args: Namespace) -> Iterator[str]:
    """Kernels of TransformerEngine and DeepEP, which only change how fast the same is computed."""
    for name, _ in given(args, "moe_grouped_gemm", "moe_permute_fusion"):
        yield f"{name}: has no effect: TransformerEngine's kernels are not used"
    if args.moe_enable_deepep:
        yield "--moe-enable-deepep: has no effect: DeepEP's kernels are not used"
    yield from _moving_biases(args)
    if args.moe_token_dispatcher_type == "flex":
        yield "--moe-token-dispatcher-type flex: is taken as alltoall, since DeepEP's kernels are not used"


def _moving_biases(args: Namespace) -> Iterator[str]:
    """A step moves weights that have no gradient."""
    rate = args.moe_router_bias_update_rate
    if not rate or not trainer_of(args).moves_expert_biases or args.debug_rollout_only:
        return
    try:
        experts = read_shape(args.hf_checkpoint).moe
    except HfConfigError:
        return  # which is an error elsewhere
    if experts is not None and experts.moe_router_enable_expert_bias:
        yield (
            f"--moe-router-bias-update-rate {rate}: each optimizer step moves the biases by which the router "
            "chooses experts so far towards a balance (0 leaves them alone)"
        )


def derive(args: Namespace) -> None:
    """Megatron-LM's defaults; a model without experts has no use for any of the flags."""
    if not isinstance(args.moe_layer_freq, tuple):  # as config.json has it; a flag is text
        wrong = list(_given_to_dense(args))
        args.expert_tensor_parallel_size = None
        args.num_experts = args.moe_router_topk = args.moe_ffn_hidden_size = 0
        args.moe_layer_freq = (0,) * args.num_layers
        if wrong:
            raise UsageError(*wrong, unknown=())
        return
    if args.moe_token_dispatcher_type == "flex":
        args.moe_token_dispatcher_type = "alltoall"
    if args.expert_tensor_parallel_size is None:
        # Each rank would add the biases of an expert that is split.
        args.expert_tensor_parallel_size = 1 if args.add_bias_linear else args.tensor_model_parallel_size
    args.moe_router_load_balancing_type = args.moe_router_load_balancing_type or ["aux_loss"]
    args.moe_aux_loss_coeff = args.moe_aux_loss_coeff or [0.0]


# Left out they have the same meaning for a dense model.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "expert_tensor_parallel_size": (1,),
    "moe_token_dispatcher_type": ("alltoall",),
    "moe_router_load_balancing_type": (["none"],),
}


def _given_to_dense(args: Namespace) -> Iterator[str]:
    for spec, value in changed(args, (*flags_of(MoeShape), *flags_of(ExpertConfig))):
        if value not in _HARMLESS.get(spec.dest, ()):
            shown = "" if isinstance(value, bool) else f" {value}"
            yield f"{spec.names[0]}{shown}: config.json of --hf-checkpoint describes a model without experts"


def contradictions(args: Namespace) -> Iterator[str]:
    """Sizes that do not divide the experts or the GPUs, and what does not work with experts."""
    if not args.num_experts:
        return
    yield from _bad_sizes(args)
    yield from _bad_losses(args)
    yield from _fixed_biases(args)
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        yield (
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size}: "
            "a model with experts needs --sequence-parallel too"
        )


def _bad_sizes(args: Namespace) -> Iterator[str]:
    experts, parts = args.expert_model_parallel_size, args.expert_tensor_parallel_size
    tp, stages = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    if args.num_experts % experts:
        yield (
            f"--expert-model-parallel-size {experts} does not divide num_experts {args.num_experts} "
            "(config.json)"
        )
    if parts > 1 and args.add_bias_linear:
        yield f"--expert-tensor-parallel-size {parts}: experts of this model have biases (wanted: 1)"
    if tp % parts:
        yield f"--expert-tensor-parallel-size {parts} does not divide --tensor-model-parallel-size {tp}"
    elif args.moe_ffn_hidden_size % parts:
        width = args.moe_ffn_hidden_size
        yield f"--expert-tensor-parallel-size {parts} does not divide moe_intermediate_size {width}"
    if (shared := args.moe_shared_expert_intermediate_size or 0) % tp:
        name = f"--tensor-model-parallel-size {tp}"
        yield f"{name} does not divide the width {shared} of shared experts (config.json)"
    if args.trainer_world_size % (experts * parts * stages) and not args.debug_rollout_only:
        yield (
            f"--expert-model-parallel-size {experts} x --expert-tensor-parallel-size {parts} x "
            f"--pipeline-model-parallel-size {stages}: does not divide {args.trainer_world_size} trainer GPUs"
        )


def _fixed_biases(args: Namespace) -> Iterator[str]:
    """What only one of the trainers does."""
    rate = args.moe_router_bias_update_rate
    moves = args.moe_router_enable_expert_bias and rate and not args.debug_rollout_only
    trainer = trainer_of(args)
    if moves and not trainer.moves_expert_biases:
        yield (
            f"--moe-router-bias-update-rate {rate}: not supported with --train-backend {trainer.name}, which "
            "leaves the biases alone by which the router chooses experts (wanted: 0)"
        )


def _bad_losses(args: Namespace) -> Iterator[str]:
    kinds, coefficients = args.moe_router_load_balancing_type, args.moe_aux_loss_coeff
    shown, trainer = " ".join(kinds), trainer_of(args)
    if "sinkhorn" in kinds or (kinds not in (["aux_loss"], ["none"]) and any(coefficients)):
        yield f"--moe-router-load-balancing-type {shown}: not supported (wanted: aux_loss or none)"
    elif len(coefficients) > 1:
        yield f"--moe-aux-loss-coeff {' '.join(map(str, coefficients))}: wanted one number"
    elif not trainer.has_router_losses and (any(coefficients) or args.moe_z_loss_coeff):
        name = "--moe-aux-loss-coeff" if any(coefficients) else "--moe-z-loss-coeff"
        yield f"{name}: not supported with --train-backend {trainer.name} (wanted: 0)"
    elif kinds == ["none"] and any(coefficients):
        yield f"--moe-aux-loss-coeff {coefficients[0]}: has no effect without aux_loss"


CONFIG_GROUP = ConfigGroup(
    {"experts of the model": MoeShape, "experts": ExpertConfig},
    derive=derive,
    notes=notes,
    contradictions=contradictions,
)
