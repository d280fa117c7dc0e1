"""Floating-point operations of forward passes."""

from collections.abc import Callable, Sequence

from slime.config.model import ModelConfig

Products = Callable[[ModelConfig], int]
"""Multiply-adds of one token."""


def dense_products(shape: ModelConfig) -> int:
    """Counts the products of the MLPs of all layers: gate, up and down."""
    return shape.num_layers * 3 * shape.hidden_size * shape.ffn_hidden_size


def moe_products(shape: ModelConfig) -> int:
    """Counts the products where layers are mixtures of experts: the router and the experts that a token is
    sent to.
    """
    experts = shape.num_experts + 3 * shape.moe_router_topk * shape.moe_ffn_hidden_size
    widths = (experts if moe else 3 * shape.ffn_hidden_size for moe in shape.moe_layer_freq)
    return shape.hidden_size * sum(widths)


def linear_flops_per_token(shape: ModelConfig, mlp: Products = dense_products) -> int:
    """Multiply-adds counted as two, of all matrix products of one token; attention scores left out."""
    query = shape.num_attention_heads * shape.kv_channels
    key_value = (shape.num_query_groups or shape.num_attention_heads) * shape.kv_channels
    attention = shape.hidden_size * (query + 2 * key_value) + query * shape.hidden_size
    return 2 * (shape.num_layers * attention + mlp(shape) + shape.hidden_size * shape.padded_vocab_size)


def causal_pairs(length: int) -> float:
    """Counts the pairs of a query and a key that it sees."""
    return length * (length + 1) / 2


def decoder_forward_flops(
    seqlens: Sequence[int], shape: ModelConfig, mlp: Products = dense_products
) -> float:
    """A decoder's FLOPs over sequences of these lengths, attention being causal."""
    width = shape.num_attention_heads * shape.kv_channels
    # Scores and weighted sum: 2 products of 2 FLOPs per pair, half of the pairs masked.
    pairs = sum(map(causal_pairs, seqlens))
    return linear_flops_per_token(shape, mlp) * sum(seqlens) + 4 * shape.num_layers * width * pairs


def latent_forward_flops(
    seqlens: Sequence[int],
    shape: ModelConfig,
    mlp: Products,
    pairs_of: Callable[[int], float] = causal_pairs,
) -> float:
    """Counts the FLOPs of a forward pass with multi-latent attention, whose keys and values are expanded from
    their latent vectors.

    ``pairs_of`` says how many pairs of query and key a sequence of a length has.
    """
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    rotated, latent = shape.qk_pos_emb_head_dim or 0, shape.kv_lora_rank or 0
    score, value = (shape.qk_head_dim or 0) + rotated, shape.v_head_dim or 0
    rank = shape.q_lora_rank
    query = hidden * heads * score if rank is None else rank * (hidden + heads * score)
    key_value = hidden * (latent + rotated) + latent * heads * (score - rotated + value)
    attention = shape.num_layers * (query + key_value + heads * value * hidden)
    pairs = sum(map(pairs_of, seqlens))
    products = attention + mlp(shape) + hidden * shape.padded_vocab_size
    return 2 * products * sum(seqlens) + 2 * shape.num_layers * heads * (score + value) * pairs
