"""The sizes of the model."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of the model, as weights and FLOPs read it, and the padded size of its vocabulary.

    What is about experts is 0 or None for dense models, and what is about latent, sparse and linear attention
    None for others; `slime.models.shape` says what it means.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    padded_vocab_size: int
    untie_embeddings_and_output_weights: bool
    qk_layernorm: bool
    add_qkv_bias: bool
    num_experts: int
    moe_router_topk: int
    moe_ffn_hidden_size: int
    moe_layer_freq: Sequence[int]
    moe_shared_expert_intermediate_size: int | None
    q_lora_rank: int | None
    kv_lora_rank: int | None
    qk_head_dim: int | None
    qk_pos_emb_head_dim: int | None
    v_head_dim: int | None
    dsa_indexer_n_heads: int | None
    dsa_indexer_head_dim: int | None
    dsa_indexer_topk: int | None
    dsa_indexer_freq: Sequence[int] | None
    linear_attention_freq: Sequence[int] | None
    linear_conv_kernel_dim: int | None
    linear_key_head_dim: int | None
    linear_value_head_dim: int | None
    linear_num_key_heads: int | None
    linear_num_value_heads: int | None
