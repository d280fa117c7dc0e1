"""The sizes and switches of a model, under Megatron-LM's names."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from slime.models.hf_config import HfConfig
from slime.models.rope import Rope

Sizes = tuple[int, ...]
"""The shape of a tensor."""


@dataclass(frozen=True)
class MoeShape:
    """The layers whose MLP is a mixture of experts.

    ``moe_layer_freq`` has a 1 for each such layer and a 0 for each dense one.

    Scores of experts are the softmax or the sigmoid of the router's logits. With ``moe_router_pre_softmax``
    the weights of the chosen experts are their share of all experts, else they sum up to 1; then they are
    multiplied by ``moe_router_topk_scaling_factor``. An expert bias is added to the scores for the choice
    only. Of ``moe_router_num_groups`` groups of experts ``moe_router_group_topk`` are chosen from.

    All shared experts together are one MLP, ``moe_shared_expert_intermediate_size`` wide, beside the chosen
    ones, if there are any; ``moe_shared_expert_gate`` weighs it by a sigmoid.
    """

    num_experts: int
    moe_router_topk: int
    moe_ffn_hidden_size: int
    moe_layer_freq: tuple[int, ...]
    moe_router_pre_softmax: bool
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_enable_expert_bias: bool = False
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_topk_scaling_factor: float | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False


@dataclass(frozen=True)
class LatentShape:
    """Multi-latent attention (DeepSeek-V2, section 2.1).

    Queries come from a latent vector of ``q_lora_rank`` (None: straight from the hidden state), keys and
    values from one of ``kv_lora_rank``. ``qk_head_dim`` features of a head have no position,
    ``qk_pos_emb_head_dim`` are rotated, those of the key being the same for all heads.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class IndexerShape:
    """What chooses the keys that sparse attention reads (DeepSeek-V3.2, section 2.1).

    Each query reads the ``dsa_indexer_topk`` keys with the highest scores, which ``dsa_indexer_n_heads``
    heads of ``dsa_indexer_head_dim`` features give. ``dsa_indexer_freq`` has a 1 for each layer with an
    indexer and a 0 for each that takes the choice of the last one before it. With ``dsa_indexer_interleaved``
    neighbouring features of a head make a pair to be rotated, else those half of the rotated ones apart.
    """

    dsa_indexer_n_heads: int
    dsa_indexer_head_dim: int
    dsa_indexer_topk: int
    dsa_indexer_freq: tuple[int, ...]
    dsa_indexer_interleaved: bool


@dataclass(frozen=True)
class LinearShape:
    """The layers with a gated delta net (Yang et al. 2024, arXiv:2412.06464) in the place of attention.

    ``linear_attention_freq`` has a 1 for each such layer and a 0 for each with attention. A causal
    convolution of ``linear_conv_kernel_dim`` tokens precedes it. Each key head serves the same number of
    value heads.
    """

    linear_attention_freq: tuple[int, ...]
    linear_conv_kernel_dim: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int


@dataclass(frozen=True)
class ModelShape:
    """A decoder. ``kv_channels`` is the size of a head, ``num_query_groups`` counts key/value heads.

    ``post_self_attn_layernorm`` and ``post_mlp_layernorm`` are norms before the residual is added.
    ``qk_norm_over_heads`` is a norm over all heads of a token, where ``qk_layernorm`` is one of each head.
    With ``layernorm_zero_centered_gamma`` norms multiply by 1 + weight. Scores of attention are multiplied by
    ``softmax_scale``, None standing for 1 / sqrt(kv_channels). ``attention_windows`` has for each layer how
    many tokens one sees, None for all; layers with a number are rotated by ``local_rope``, if there is one.
    Embeddings are multiplied by ``embedding_factor``. With ``attention_output_gate`` the projection of
    queries gives a gate too, whose sigmoid weighs what each head attends to.

    With ``add_bias_linear`` all projections have biases, those of experts and routers too. A ``softmax_type``
    "learnable" adds a number of each head, its sink, to the scores that softmax is taken of. In a gated MLP
    ``glu_linear_offset`` is added to what the gate weighs; both are limited to
    ``activation_func_clamp_value``, the gate on the upper side only.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    norm_epsilon: float
    vocab_size: int
    max_position_embeddings: int
    untie_embeddings_and_output_weights: bool
    rope: Rope
    qk_layernorm: bool = False
    add_qkv_bias: bool = False
    add_output_bias: bool = False
    add_mlp_bias: bool = False
    post_self_attn_layernorm: bool = False
    post_mlp_layernorm: bool = False
    qk_norm_over_heads: bool = False
    layernorm_zero_centered_gamma: bool = False
    softmax_scale: float | None = None
    attention_windows: tuple[int | None, ...] | None = None
    local_rope: Rope | None = None
    embedding_factor: float = 1.0
    activation: Literal["silu", "gelu_pytorch_tanh", "quick_gelu"] = "silu"
    attention_output_gate: bool = False
    add_bias_linear: bool = False
    softmax_type: Literal["vanilla", "learnable"] = "vanilla"
    glu_linear_offset: float = 0.0
    activation_func_clamp_value: float | None = None
    moe: MoeShape | None = None
    latent: LatentShape | None = None
    indexer: IndexerShape | None = None
    linear: LinearShape | None = None


def trained_shape(shape: ModelShape, config: HfConfig) -> dict[str, Any]:
    """The shape as flags of the trainer.

    Raises:
        HfConfigError: the trainer would compute something else than the model does.
    """
    config.require(attention_dropout=0.0)
    for name, switch in (("attention_bias", shape.add_output_bias), ("mlp_bias", shape.add_mlp_bias)):
        if switch:
            raise config.unsupported(name, True, False)
    values = {name: value for name, value in vars(shape).items() if name not in _NOT_FLAGS}
    return {
        **values,
        **(vars(shape.moe) if shape.moe else {}),
        **(vars(shape.latent) if shape.latent else dict.fromkeys(_LATENT_FIELDS)),
        **(vars(shape.indexer) if shape.indexer else dict.fromkeys(_INDEXER_FIELDS)),
        **(vars(shape.linear) if shape.linear else dict.fromkeys(_LINEAR_FIELDS)),
        "multi_latent_attention": shape.latent is not None,
        "swiglu": shape.activation == "silu",
        "quick_geglu": shape.activation == "quick_gelu",
        "layernorm_epsilon": shape.norm_epsilon,
        "rotary_base": shape.rope.base,
        "rope_type": "yarn" if shape.rope.kind == "yarn" else "rope",
        "rotary_percent": shape.rope.percent,
        "rotary_interleaved": shape.rope.interleaved,
        "use_rope_scaling": shape.rope.kind == "llama3",
        "rope_scaling_factor": shape.rope.factor("factor") or 8.0,
        "mscale": shape.rope.factor("mscale"),
        "mscale_all_dim": shape.rope.factor("mscale_all_dim"),
    }


_NOT_FLAGS = frozenset({"add_output_bias", "add_mlp_bias", "moe", "latent", "indexer", "linear"})
_LATENT_FIELDS = [field.name for field in fields(LatentShape)]
_INDEXER_FIELDS = [field.name for field in fields(IndexerShape)]
_LINEAR_FIELDS = [field.name for field in fields(LinearShape)]


def pad_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel_size: int) -> int:
    """``vocab_size`` rounded up to a multiple of ``divisible_by * tensor_parallel_size``."""
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple
