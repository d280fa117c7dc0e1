import torch
import transformers

from slime.models import calculate_fwd_flops, shape_from_hf_config
from tests.families import save_tiny_config, tiny_config
from tests.run_args import plugin_args, shape_with


def test_forward_flops_of_a_shape_counted_by_hand():
    args = shape_with(
        **dict(model_type="llama", num_layers=2, hidden_size=4, ffn_hidden_size=6, num_attention_heads=2),
        **dict(num_query_groups=1, kv_channels=3, padded_vocab_size=10),
    )
    # Per layer: q 4x6, k and v 4x3 each, output 6x4, MLP 3 * 4x6; head 4x10; a product costs 2.
    linear = 2 * (2 * (24 + 12 + 12 + 24 + 72) + 40)
    # Per layer, 2 heads of width 3 and 3 causal pairs of 2 tokens: scores and sum.
    attention = 2 * 2 * 2 * 6 * 3
    assert calculate_fwd_flops([2], args) == 2 * linear + attention
    assert calculate_fwd_flops([2, 2], args) == 2 * calculate_fwd_flops([2], args)
    # A plug-in may have sizes alone; where it has no width of a head, the heads share the hidden size.
    sizes = plugin_args(num_layers=2, hidden_size=4, ffn_hidden_size=6, num_attention_heads=2)
    vars(sizes).update(num_query_groups=1, vocab_size=10)
    narrow = 2 * (2 * (16 + 8 + 8 + 16 + 72) + 40)
    assert calculate_fwd_flops([2], sizes) == 2 * narrow + 2 * 2 * 2 * 4 * 3
    sizes.kv_channels = 3
    assert calculate_fwd_flops([2], sizes) == 2 * linear + attention


def test_forward_flops_of_delta_nets_are_those_of_their_matrices_and_states(tmp_path):
    name = "qwen3_5_text"
    config = tiny_config(name)
    shape = shape_from_hf_config(save_tiny_config(name, tmp_path))
    args = shape_with(**shape, padded_vocab_size=config.vocab_size)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    kinds = (torch.nn.Linear, torch.nn.Conv1d)
    matrices = sum(one.weight.numel() for one in model.modules() if isinstance(one, kinds))
    deltas = config.layer_types.count("linear_attention")
    full = config.num_hidden_layers - deltas
    # The state of a value head is read, corrected and written.
    state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    # Scores and weighted sum of 3 causal pairs of 2 tokens.
    attention = 2 * 2 * full * config.num_attention_heads * config.head_dim * 3
    assert deltas and full
    assert calculate_fwd_flops([2], args) == 2 * 2 * (matrices + 3 * deltas * state) + attention
