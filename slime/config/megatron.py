"""Flags that megatron-core's own dataclasses declare, as far as code of ours reads them."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MegatronConfig:
    """Help, default and range are megatron-core's; `slime.arguments.groups.megatron` makes flags of them."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    sequence_parallel: bool
    account_for_embedding_in_pipeline_split: bool
    account_for_loss_in_pipeline_split: bool
    bias_activation_fusion: bool
    distribute_saved_activations: bool
    recompute_granularity: str | None
    recompute_method: str | None
    recompute_modules: list[str] | None
    recompute_num_layers: int | None
    pad_buckets_for_high_nccl_busbw: bool
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    decoupled_weight_decay: bool
    deterministic_mode: bool
    log_num_zeros_in_grad: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    align_param_gather: bool
