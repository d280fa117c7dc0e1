"""Makes megatron-core's TransformerConfig of the configuration of a run."""

from dataclasses import fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from slime.config.backend import BackendConfig
from slime.config.experts import ExpertConfig
from slime.config.model import ModelConfig
from slime.config.run import values_of

# What the families have in common.
_ARCHITECTURE: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}

_ACTIVATIONS = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
}

# The fusions need kernels of TransformerEngine or Apex. The token dispatcher is checked even in dense
# models: megatron-core's all-gather refuses the variable lengths that packed batches have, ours does not.
_RUNTIME: dict[str, Any] = {
    "mtp_num_layers": None,  # those are ours, see `slime.backends.megatron_utils.mtp`
    "variable_seq_lengths": True,
    "moe_token_dispatcher_type": "alltoall",
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "cuda_graph_scope": [],
}

# Fields whose flag carries another name.
_FLAG_OF = {
    "layernorm_epsilon": "norm_epsilon",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "num_moe_experts": "num_experts",
}


def transformer_config(config: BackendConfig) -> TransformerConfig:
    """The config of one pipeline stage.

    Every TransformerConfig field that the command line holds a value for is taken over; what the supported
    architectures and packed batches demand comes last.
    """
    given, values = values_of(config), {}
    has_experts = bool(config.model.num_experts)
    kind = MLATransformerConfig if config.model.kv_lora_rank is not None else TransformerConfig
    for name in (f.name for f in fields(kind) if f.init):
        if not has_experts and (name == "num_moe_experts" or name.startswith("moe_")):
            continue  # megatron-core refuses a dense model with their sizes
        value = given.get(_FLAG_OF.get(name, name))
        if value is not None:
            values[name] = value
    dtype = config.precision.params_dtype
    values.update(_ARCHITECTURE, **_RUNTIME)
    values.update(
        activation_func=_ACTIVATIONS[config.model.activation],
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
    )
    values.update(_attention_values(config.model), **_expert_values(config.model, config.experts))
    if config.parallelism.virtual_pipeline_model_parallel_size:
        # Stages send in both directions at once. In one batch that deadlocks at two stages, even on NCCL.
        values.update(overlap_p2p_comm=True, batch_p2p_comm=False)
    made = kind(**values)
    if has_experts:
        made.moe_token_dispatcher_type = config.experts.moe_token_dispatcher_type
    return made


def _attention_values(model: ModelConfig) -> dict[str, Any]:
    """The rotary embedding is ours, and so are norms that megatron-core would count twice in gradients.

    megatron-core's checkpoints tell layers apart where a list says that they are of several kinds.
    """
    if model.qk_norm_over_heads:
        return {"qk_layernorm": False}
    if model.linear_attention_freq:
        return {"linear_attention_freq": list(model.linear_attention_freq)}
    if model.kv_lora_rank is None:
        return {}
    rotary = {"rope_type": "rope", "rotary_percent": 1.0, "rotary_interleaved": False}
    scaling = {"rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    return {"q_lora_rank": model.q_lora_rank, "qk_layernorm": False, **rotary, **scaling}


def _expert_values(model: ModelConfig, experts: ExpertConfig) -> dict[str, Any]:
    """Lists of one are values: megatron-core knows several ways to balance experts at once, we one."""
    if not model.num_experts:
        return {}
    kinds, coefficients = experts.moe_router_load_balancing_type, experts.moe_aux_loss_coeff
    assert kinds and coefficients  # both follow from flags
    groups = model.moe_router_num_groups or 1
    return {
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": model.moe_router_group_topk if groups > 1 else None,
        "moe_layer_freq": list(model.moe_layer_freq),
        "moe_router_load_balancing_type": kinds[0],
        "moe_aux_loss_coeff": coefficients[0],
    }
