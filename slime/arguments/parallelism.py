"""Flags: parallel layout and recomputation, where Megatron-LM's name is not the dataclass field's."""

from dataclasses import dataclass
from typing import Literal

from slime.arguments.flags import flag, refused


@dataclass(frozen=True)
class ParallelArgs:
    """Layout of the trainer's processes."""

    decoder_first_pipeline_num_layers: int | None = flag(help="layers of the first pipeline stage")
    decoder_last_pipeline_num_layers: int | None = flag(help="layers of the last pipeline stage")
    num_layers_per_virtual_pipeline_stage: int | None = refused(help="layers of a virtual stage")
    num_virtual_stages_per_pipeline_rank: int | None = refused(help="virtual stages of a pipeline rank")
    num_experts: int | None = refused(help="experts of an MoE layer")
    moe_layer_freq: str | None = refused(help="which layers are MoE layers")
    moe_router_load_balancing_type: list[str] | None = refused(help="how the router balances experts")
    moe_aux_loss_coeff: list[float] | None = refused(help="weight of the balancing loss")
    q_lora_rank: int | None = refused(help="rank of the query projection of multi-latent attention")
    expert_model_parallel_size: int = refused(1, help="expert parallel size", wanted="1")
    expert_tensor_parallel_size: int | None = refused(help="tensor parallel size of experts")
    context_parallel_size: int = refused(1, help="context parallel size", wanted="1")
    multi_latent_attention: bool = refused(False, help="DeepSeek's attention")
    mtp_num_layers: int | None = refused(help="multi-token prediction layers")
    mtp_loss_scaling_factor: float = refused(0.2, help="weight of the multi-token prediction loss")
    enable_mtp_training: bool = refused(False, help="train multi-token prediction layers")


@dataclass(frozen=True)
class ComputeArgs:
    """How a layer is computed."""

    transformer_impl: Literal["local", "transformer_engine"] = flag(
        "local", supported=("local",), help="who implements the layers"
    )
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = flag(
        "auto",
        supported=("auto", "flash", "local"),
        help="attention kernel; torch's scaled_dot_product_attention chooses it",
    )
    attention_dropout: float = refused(0.0, help="dropout of attention", wanted="0.0")
    hidden_dropout: float = refused(0.0, help="dropout of the residual stream", wanted="0.0")
    attention_softmax_in_fp32: bool | None = flag(const=True, help="softmax in float32 (always so)")
    bias_dropout_fusion: bool = flag(False, help="fuse bias and dropout; no effect without dropout")
    no_bias_dropout_fusion: bool | None = flag(const=True, help="do not fuse bias and dropout (default)")
    masked_softmax_fusion: bool = refused(False, help="fused softmax kernel")
    no_masked_softmax_fusion: bool | None = flag(const=True, help="no fused softmax kernel (default)")
    bias_swiglu_fusion: bool = refused(False, help="fuse bias and SwiGLU")
    no_bias_swiglu_fusion: bool | None = flag(const=True, help="do not fuse bias and SwiGLU (default)")
    no_persist_layer_norm: bool | None = flag(const=True, help="no persistent norm kernel (default)")
    apply_rope_fusion: bool = refused(False, help="fused rotary embedding")
    no_rope_fusion: bool | None = flag(const=True, help="no fused rotary embedding (default)")
    gradient_accumulation_fusion: bool = refused(False, help="fuse gradient accumulation into the GEMM")
    no_gradient_accumulation_fusion: bool | None = flag(const=True, help="do not fuse it (default)")
