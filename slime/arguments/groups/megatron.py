"""Which of megatron-core's generated flags are honoured, renamed, or not flags at all.

A field that no list names becomes a flag that is refused unless it has its default: so a new
megatron-core brings its flags along, and each is used only after someone has said that it works.
"""

import dataclasses
from collections.abc import Collection
from functools import cache
from typing import Any

from slime.arguments.core.flag import Flag
from slime.arguments.core.foreign import field_reason
from slime.arguments.groups.megatron_source import config_flags

# The dense GPT path of megatron-core acts on these once its config carries them.
HONOURED = frozenset(
    {
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "adam_beta1",
        "adam_beta2",
        "adam_eps",
        "align_param_gather",
        "apply_wd_to_qk_layernorm",
        "average_in_collective",
        "batch_p2p_comm",
        "batch_p2p_sync",
        "bias_activation_fusion",
        "bucket_size",
        "check_for_large_grads",
        "deallocate_pipeline_outputs",
        "decoupled_lr",
        "decoupled_min_lr",
        "decoupled_weight_decay",
        "deterministic_mode",
        "distribute_saved_activations",
        "embedding_init_method_std",
        "fp32_residual_connection",
        "init_method_std",
        "log_num_zeros_in_grad",
        "num_microbatches_with_partial_activation_checkpoints",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "pad_buckets_for_high_nccl_busbw",
        "perform_initialization",
        "pipeline_model_parallel_size",
        "recompute_granularity",
        "recompute_method",
        "recompute_modules",
        "recompute_num_layers",
        "reduce_scatter_with_fp32_accumulation",
        "sequence_parallel",
        "tensor_model_parallel_size",
        "use_cpu_initialization",
    }
)
# Of those that are numbers.
RANGES: dict[str, dict[str, Any]] = {
    "adam_beta1": {"at_least": 0, "below": 1},
    "adam_beta2": {"at_least": 0, "below": 1},
    "adam_eps": {"above": 0, "at_most": 1},
    "bucket_size": {"above": 0},
    "decoupled_lr": {"at_least": 0, "at_most": 1},
    "decoupled_min_lr": {"at_least": 0, "at_most": 1},
    "embedding_init_method_std": {"at_least": 0},
    "init_method_std": {"at_least": 0},
    "num_microbatches_with_partial_activation_checkpoints": {"at_least": 0},
    "pipeline_model_parallel_size": {"above": 0},
    "recompute_num_layers": {"above": 0},
    "tensor_model_parallel_size": {"above": 0},
}
# Values that mean the same as leaving the flag out.
SAME_AS_DEFAULT: dict[str, tuple[Any, ...]] = {
    "hierarchical_context_parallel_sizes": ([1],),
    "moe_input_jitter_eps": (0.0,),
}
_OTHER_MODEL = "leave it out: the engines would compute something else"
_NO_KERNEL = "leave it out: it needs kernels that are not used"
_NO_FAMILY = "leave it out: no supported family has it"
# What to do without a refused flag, or why it is refused.
INSTEAD = {
    "moe_apply_probs_on_input": _OTHER_MODEL,
    "moe_enable_routing_replay": "--use-routing-replay or --use-rollout-routing-replay",
    "moe_expert_capacity_factor": _OTHER_MODEL,
    "moe_input_jitter_eps": _OTHER_MODEL,
    "moe_latent_size": _NO_FAMILY,
    "moe_layer_recompute": "--recompute-granularity selective --recompute-modules moe",
    "moe_pad_expert_input_to_capacity": _OTHER_MODEL,
    "moe_router_force_load_balancing": _OTHER_MODEL,
    "moe_router_fusion": _NO_KERNEL,
    "moe_token_dropping": _OTHER_MODEL,
    "moe_use_legacy_grouped_gemm": _NO_KERNEL,
    "overlap_moe_expert_parallel_comm": _NO_KERNEL,
}
# Numbers of optimizers that are refused.
IDLE_WITHOUT = {
    "muon_extra_scale_factor": "--optimizer muon",
    "muon_momentum": "--optimizer muon",
    "muon_num_ns_steps": "--optimizer muon",
} | {
    f"tp_comm_{what}": "--tp-comm-overlap"
    for what in ("bulk_wgrad", "bulk_dgrad", "overlap_ag", "overlap_rs")
}
IDLE_WITHOUT |= {f"tp_comm_split_{what}": "--tp-comm-overlap" for what in ("ag", "rs")}
# Set by this package from other flags, or by the trainer itself, or of no effect by now.
NOT_FLAGS = frozenset(
    {
        "async_tensor_model_parallel_allreduce",
        "barrier_with_L1_time",
        "check_for_nan_in_grad",
        "enable_autocast",
        "fp8",
        "fp8_param",
        "gated_linear_unit",
        "grad_reduce_in_fp32",
        "layernorm_epsilon",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "num_moe_experts",
        "test_mode",
        "variable_seq_lengths",
        "virtual_pipeline_model_parallel_size",
    }
)
# Megatron-LM's option string where it is not the field's name.
RENAMED = {
    "average_in_collective": "--ddp-average-in-collective",
    "bucket_size": "--ddp-bucket-size",
    "pad_buckets_for_high_nccl_busbw": "--ddp-pad-buckets-for-high-nccl-busbw",
    "reduce_scatter_with_fp32_accumulation": "--ddp-reduce-scatter-with-fp32-accumulation",
}


def _short(text: str, limit: int = 160) -> str:
    """The first sentence of a docstring, cut at a word."""
    sentence = text.split(". ")[0].rstrip(".")
    return sentence if len(sentence) <= limit else sentence[:limit].rsplit(" ", 1)[0] + " ..."


def _adapt(spec: Flag) -> Flag:
    names = (RENAMED[spec.dest],) if spec.dest in RENAMED else spec.names
    default = False if spec.type is bool and spec.default is None else spec.default
    spec = dataclasses.replace(spec, names=names, default=default, help=_short(spec.help))
    if spec.dest in HONOURED:
        return dataclasses.replace(spec, **RANGES.get(spec.dest, {}))
    return dataclasses.replace(
        spec,
        supported=(default,),
        wanted=INSTEAD.get(spec.dest) or field_reason(names[0]),
        same_as_default=SAME_AS_DEFAULT.get(spec.dest, ()),
        idle_without=IDLE_WITHOUT.get(spec.dest, ""),
    )


def megatron_flags(declared: Collection[str], option_strings: Collection[str]) -> list[Flag]:
    """Generated flags, without those whose dest or option string is declared by hand."""
    return [
        spec for spec in _adapted() if spec.dest not in declared and not set(spec.names) & set(option_strings)
    ]


@cache
def _adapted() -> tuple[Flag, ...]:
    return tuple(_adapt(spec) for spec in config_flags() if spec.dest not in NOT_FLAGS)
