"""Floating-point operations of a dense GPT's forward pass, from the shape in ``args``."""

from argparse import Namespace
from collections.abc import Sequence


def linear_flops_per_token(args: Namespace) -> int:
    """Multiply-adds counted as two, of all matrix products of one token; attention scores left out."""
    query = args.num_attention_heads * args.kv_channels
    key_value = (args.num_query_groups or args.num_attention_heads) * args.kv_channels
    attention = args.hidden_size * (query + 2 * key_value) + query * args.hidden_size
    mlp = 3 * args.hidden_size * args.ffn_hidden_size
    return 2 * (args.num_layers * (attention + mlp) + args.hidden_size * args.padded_vocab_size)


def calculate_fwd_flops(seqlens: Sequence[int], args: Namespace) -> float:
    """FLOPs of a forward pass over sequences of these lengths, attention being causal."""
    width = args.num_attention_heads * args.kv_channels
    # Scores and weighted sum: 2 products of 2 FLOPs per pair, half of the pairs masked.
    pairs = sum(length * (length + 1) / 2 for length in seqlens)
    return linear_flops_per_token(args) * sum(seqlens) + 4 * args.num_layers * width * pairs
