from argparse import Namespace

from slime.models import calculate_fwd_flops


def test_forward_flops_of_a_shape_counted_by_hand():
    args = Namespace(
        model_type="llama", num_layers=2, hidden_size=4, ffn_hidden_size=6, num_attention_heads=2
    )
    vars(args).update(num_query_groups=1, kv_channels=3, padded_vocab_size=10)
    # Per layer: q 4x6, k and v 4x3 each, output 6x4, MLP 3 * 4x6; head 4x10; a product costs 2.
    linear = 2 * (2 * (24 + 12 + 12 + 24 + 72) + 40)
    # Per layer, 2 heads of width 3 and 3 causal pairs of 2 tokens: scores and sum.
    attention = 2 * 2 * 2 * 6 * 3
    assert calculate_fwd_flops([2], args) == 2 * linear + attention
    assert calculate_fwd_flops([2, 2], args) == 2 * calculate_fwd_flops([2], args)
