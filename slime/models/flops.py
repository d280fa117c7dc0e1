"""Floating-point operations of forward passes."""

from collections.abc import Sequence

from slime.models.shape import ShapeArgs


def linear_flops_per_token(shape: ShapeArgs) -> int:
    """Multiply-adds counted as two, of all matrix products of one token; attention scores left out."""
    query = shape.num_attention_heads * shape.kv_channels
    key_value = (shape.num_query_groups or shape.num_attention_heads) * shape.kv_channels
    attention = shape.hidden_size * (query + 2 * key_value) + query * shape.hidden_size
    mlp = 3 * shape.hidden_size * shape.ffn_hidden_size
    return 2 * (shape.num_layers * (attention + mlp) + shape.hidden_size * shape.padded_vocab_size)


def decoder_forward_flops(seqlens: Sequence[int], shape: ShapeArgs) -> float:
    """A dense decoder's FLOPs over sequences of these lengths, attention being causal."""
    width = shape.num_attention_heads * shape.kv_channels
    # Scores and weighted sum: 2 products of 2 FLOPs per pair, half of the pairs masked.
    pairs = sum(length * (length + 1) / 2 for length in seqlens)
    return linear_flops_per_token(shape) * sum(seqlens) + 4 * shape.num_layers * width * pairs
