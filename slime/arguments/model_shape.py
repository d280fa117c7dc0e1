"""Flags: the shape of the model, under Megatron-LM's names.

Every one defaults to None: the HF config gives the value, and a flag that contradicts it is an error.
"""

from dataclasses import dataclass
from typing import Literal

from slime.arguments.flags import flag, refused


@dataclass(frozen=True)
class ModelShapeArgs:
    """What config.json says too."""

    num_layers: int | None = flag(help="transformer layers")
    hidden_size: int | None = flag(help="width of the residual stream")
    ffn_hidden_size: int | None = flag(help="width of the MLP")
    num_attention_heads: int | None = flag(help="query heads")
    group_query_attention: bool | None = flag(const=True, help="fewer key-value heads than query heads")
    num_query_groups: int | None = flag(help="key-value heads")
    kv_channels: int | None = flag(help="size of one head")
    max_position_embeddings: int | None = flag(help="longest sequence the model knows")
    norm_epsilon: float | None = flag(
        names=("--norm-epsilon", "--layernorm-epsilon"), help="epsilon of norms"
    )
    normalization: Literal["LayerNorm", "RMSNorm"] | None = flag(help="kind of norm")
    position_embedding_type: Literal["learned_absolute", "rope", "mrope", "relative", "none"] | None = flag(
        help="kind of position embedding"
    )
    use_rotary_position_embeddings: bool | None = flag(const=True, help="the same as position embedding rope")
    rope_type: Literal["rope", "yarn"] | None = flag(
        supported=("rope",), help="kind of rotary embedding; config.json says how it is scaled"
    )
    rotary_base: float | None = flag(help="base of rotary embeddings (rope_theta)")
    rotary_percent: float | None = flag(help="part of a head that is rotated")
    use_rope_scaling: bool | None = flag(const=True, help="Llama 3's scaling of rotary frequencies")
    rope_scaling_factor: float | None = flag(help="factor of the scaling")
    swiglu: bool | None = flag(const=True, help="gated MLP with SiLU")
    add_bias_linear: bool | None = flag(
        names=("--add-bias-linear",), const=True, help="bias in every linear layer"
    )
    disable_bias_linear: bool | None = flag(const=True, help="no bias in linear layers")
    add_qkv_bias: bool | None = flag(const=True, help="bias in the projections to query, key and value")
    qk_layernorm: bool | None = flag(const=True, help="norm on queries and keys")
    untie_embeddings_and_output_weights: bool | None = flag(
        const=True, help="the output layer has its own weights"
    )
    vocab_size: int | None = flag(help="rows of the embedding")


@dataclass(frozen=True)
class VocabularyArgs:
    """Padding of the vocabulary, and the tokenizer."""

    make_vocab_size_divisible_by: int = flag(
        128, help="the vocabulary is padded to a multiple of this times TP"
    )
    padded_vocab_size: int | None = flag(help="size of the padded vocabulary; default computed")
    tokenizer_type: Literal["HuggingFaceTokenizer"] = flag(
        "HuggingFaceTokenizer", help="kind of tokenizer; it is read from --hf-checkpoint"
    )
    tokenizer_model: str | None = refused(
        help="tokenizer directory", wanted="leave it out, --hf-checkpoint has it"
    )
    seq_length: int = flag(4096, help="nominal sequence length; batches are packed to their true lengths")
    spec: list[str] | None = refused(help="module and function of a layer spec")
