"""The shape of the model: its sizes and switches, under Megatron-LM's names.

Each is stated once: one that is a flag as well says so in its field. config.json decides all of them.
"""

from dataclasses import dataclass
from typing import Literal

from slime.config.flag import flag, shape_flag


@dataclass(frozen=True, kw_only=True)
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

    num_experts: int = shape_flag(at_least=0, same_as_default=(0,), help="experts of an MoE layer")
    moe_router_topk: int = shape_flag(above=0, help="experts that a token is sent to")
    moe_ffn_hidden_size: int = shape_flag(above=0, help="width of an expert's MLP")
    moe_layer_freq: tuple[int, ...] = shape_flag(
        type=str | None,
        same_as_default=("1",),
        help="which layers have experts: N for every N-th one, or a list such as [0]*1+[1]*47",
    )
    moe_router_pre_softmax: bool = shape_flag(
        const=True, help="weigh experts by their share of all of them, not of the chosen ones"
    )
    moe_router_score_function: Literal["softmax", "sigmoid"] = shape_flag(
        "softmax", help="what makes scores of a router's logits"
    )
    moe_router_enable_expert_bias: bool = shape_flag(
        False, const=True, help="a bias of each expert takes part in the choice, not in the weights"
    )
    moe_router_num_groups: int | None = shape_flag(None, above=0, help="groups of experts to choose from")
    moe_router_group_topk: int | None = shape_flag(
        None, above=0, help="groups that a token's experts may come from"
    )
    moe_router_topk_scaling_factor: float | None = shape_flag(
        None, above=0, help="factor of the weights of the chosen experts"
    )
    moe_shared_expert_intermediate_size: int | None = shape_flag(
        None, at_least=0, same_as_default=(0,), help="width of all shared experts together"
    )
    moe_shared_expert_gate: bool = shape_flag(False, const=True, help="a sigmoid weighs the shared experts")


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Multi-latent attention (DeepSeek-V2, section 2.1).

    Queries come from a latent vector of ``q_lora_rank`` (None: straight from the hidden state), keys and
    values from one of ``kv_lora_rank``. ``qk_head_dim`` features of a head have no position,
    ``qk_pos_emb_head_dim`` are rotated, those of the key being the same for all heads.
    """

    q_lora_rank: int | None = shape_flag(above=0, help="width of the latent vector that queries come from")
    kv_lora_rank: int = shape_flag(above=0, help="width of the one that keys and values come from")
    qk_head_dim: int = shape_flag(above=0, help="features of a query or key head that are not rotated")
    qk_pos_emb_head_dim: int = shape_flag(above=0, help="those that are")
    v_head_dim: int = shape_flag(above=0, help="features of a value head")


@dataclass(frozen=True, kw_only=True)
class IndexerShape:
    """What chooses the keys that sparse attention reads (DeepSeek-V3.2, section 2.1).

    Each query reads the ``dsa_indexer_topk`` keys with the highest scores, which ``dsa_indexer_n_heads``
    heads of ``dsa_indexer_head_dim`` features give. ``dsa_indexer_freq`` has a 1 for each layer with an
    indexer and a 0 for each that takes the choice of the last one before it. With ``dsa_indexer_interleaved``
    neighbouring features of a head make a pair to be rotated, else those half of the rotated ones apart.
    """

    dsa_indexer_n_heads: int = shape_flag(above=0, help="heads of an indexer")
    dsa_indexer_head_dim: int = shape_flag(above=0, help="features of an indexer's head")
    dsa_indexer_topk: int = shape_flag(above=0, help="keys that a query reads, as an indexer chooses them")
    dsa_indexer_freq: tuple[int, ...]
    dsa_indexer_interleaved: bool


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """The layers with a gated delta net (Yang et al. 2024, arXiv:2412.06464) in the place of attention.

    ``linear_attention_freq`` has a 1 for each such layer and a 0 for each with attention. A causal
    convolution of ``linear_conv_kernel_dim`` tokens precedes it. Each key head serves the same number of
    value heads.
    """

    linear_attention_freq: tuple[int, ...]
    linear_conv_kernel_dim: int = shape_flag(above=0, help="tokens of the convolution before a delta net")
    linear_key_head_dim: int = shape_flag(above=0, help="features of a delta net's query or key head")
    linear_value_head_dim: int = shape_flag(above=0, help="features of its value head")
    linear_num_key_heads: int = shape_flag(above=0, help="its query and key heads")
    linear_num_value_heads: int = shape_flag(above=0, help="its value heads")


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """What any decoder has.

    ``kv_channels`` is the size of a head, ``num_query_groups`` counts key/value heads.

    ``post_self_attn_layernorm`` and ``post_mlp_layernorm`` are norms before the residual is added.
    ``qk_norm_over_heads`` is a norm over all heads of a token, where ``qk_layernorm`` is one of each head.
    With ``layernorm_zero_centered_gamma`` norms multiply by 1 + weight. Scores of attention are multiplied by
    ``softmax_scale``, None standing for 1 / sqrt(kv_channels). ``attention_windows`` has for each layer how
    many tokens one sees, None for all.
    Embeddings are multiplied by ``embedding_factor``. With ``attention_output_gate`` the projection of
    queries gives a gate too, whose sigmoid weighs what each head attends to.

    With ``add_bias_linear`` all projections have biases, those of experts and routers too. A ``softmax_type``
    "learnable" adds a number of each head, its sink, to the scores that softmax is taken of. In a gated MLP
    ``glu_linear_offset`` is added to what the gate weighs; both are limited to
    ``activation_func_clamp_value``, the gate on the upper side only.
    """

    model_type: str
    num_layers: int = shape_flag(above=0, help="transformer layers")
    hidden_size: int = shape_flag(above=0, help="width of the residual stream")
    ffn_hidden_size: int = shape_flag(above=0, help="width of the MLP")
    num_attention_heads: int = shape_flag(above=0, help="query heads")
    num_query_groups: int = shape_flag(above=0, help="key-value heads")
    kv_channels: int = shape_flag(above=0, help="size of one head")
    norm_epsilon: float = shape_flag(
        names=("--norm-epsilon", "--layernorm-epsilon"), above=0, help="epsilon of norms"
    )
    vocab_size: int = shape_flag(above=0, help="rows of the embedding")
    max_position_embeddings: int = shape_flag(above=0, help="longest sequence the model knows")
    untie_embeddings_and_output_weights: bool = shape_flag(
        const=True, help="the output layer has its own weights"
    )
    qk_layernorm: bool = shape_flag(False, const=True, help="norm on queries and keys")
    add_qkv_bias: bool = shape_flag(False, const=True, help="bias in the projections to query, key and value")
    post_self_attn_layernorm: bool = shape_flag(False, const=True, help="norm after attention")
    post_mlp_layernorm: bool = shape_flag(False, const=True, help="norm after the MLP")
    qk_norm_over_heads: bool = False
    layernorm_zero_centered_gamma: bool = shape_flag(
        False, names=("--apply-layernorm-1p",), const=True, help="norms multiply by 1 + weight"
    )
    softmax_scale: float | None = None
    attention_windows: tuple[int | None, ...] | None = None
    embedding_factor: float = 1.0
    activation: Literal["silu", "gelu_pytorch_tanh", "quick_gelu"] = "silu"
    attention_output_gate: bool = shape_flag(
        False,
        names=("--attention-output-gate", "--use-gated-attention"),
        const=True,
        help="a sigmoid weighs what each head attends to",
    )
    add_bias_linear: bool = shape_flag(
        False, names=("--add-bias-linear",), const=True, help="bias in every linear layer"
    )
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = shape_flag(
        "vanilla", help="learnable: the softmax of attention has a sink, a learned score of each head"
    )
    glu_linear_offset: float = shape_flag(0.0, at_least=0, help="added to what the gate of an MLP weighs")
    activation_func_clamp_value: float | None = shape_flag(
        None, above=0, help="limit of the gate and what it weighs"
    )


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """What few decoders have."""

    moe: MoeShape | None = None
    latent: LatentShape | None = None
    indexer: IndexerShape | None = None
    linear: LinearShape | None = None


PARTS: dict[str, tuple[str, type]] = {
    "latent": ("latent attention", LatentShape),
    "indexer": ("sparse attention", IndexerShape),
    "linear": ("linear attention", LinearShape),
}
"""What there is of `ModelParts` beside experts, with the heading of its flags.

The names of one that a model has not are None in ``args``.
"""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(DecoderShape, MoeShape, LatentShape, IndexerShape, LinearShape):
    """The shape of the model, and the padded size of its vocabulary.

    What is about experts is 0 or None for dense models, and the names of `PARTS` are None for models without
    them.
    """

    padded_vocab_size: int


@dataclass(frozen=True, kw_only=True)
class LayerVariantConfig:
    """A layer spec in the place of the family's."""

    spec: list[str] | None = flag(help="module and function of a layer spec: fn(args, config, vp_stage)")
