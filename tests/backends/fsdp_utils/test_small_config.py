"""Small configs have less of everything, and keep what tells layers, experts and lengths from each other."""

from copy import deepcopy

import transformers

from slime.backends.fsdp_utils import small_config as small
from tests.each import hold_each

_KINDS = ["a", "b"] * 4 + ["a", "c", "a", "b"]

LAYERS = [
    (
        {
            **{"num_hidden_layers": 12, "layer_types": _KINDS, "full_attention_interval": 3},
            **{
                "dense_layers": [2, 5, 9],
                "layer_scales": {"3": "x", "8": "y", "9": "z"},
                "window_layers": 12,
            },
        },
        {
            **{"num_hidden_layers": 5, "layer_types": ["a", "b", "a", "b", "c"]},
            **{"dense_layers": [2, 4], "layer_scales": {3: "x", 4: "z"}, "window_layers": 4},
        },
    ),
    ({"num_layers": 30, "offset": 8}, {"num_layers": 9}),
    ({"num_layers": 30, "offset": 9}, {"num_layers": 2}),
    ({"n_layer": 2, "offset": 5, "window_layers": 0}, {}),
    ({"num_layers": 4, "one": [3], "same": [2, 2], "falling": [3, 1], "beyond": [1, 4]}, {"num_layers": 2}),
    ({"num_layers": 0, "layer_types": []}, {}),
]

WIDTHS = [
    (
        {
            **{"num_attention_heads": 16, "num_key_value_heads": 16, "hidden_size": 2048},
            **{"intermediate_size": [4096, 100, 8], "vocab_size": 32000, "eos_token_id": 1025},
            **{"pad_token_id": 0, "image_token_index": 600, "head_dim": 128},
        },
        {
            **{"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 256},
            **{
                "intermediate_size": [512, 16, 8],
                "vocab_size": 512,
                "eos_token_id": 1,
                "image_token_index": 88,
            },
        },
    ),
    ({"n_head": 16, "num_kv_heads": 4, "d_ff": 64}, {"n_head": 2, "num_kv_heads": 1, "d_ff": 8}),
    ({"n_heads": 2, "num_kv_heads": 2, "d_model": 64, "vocab_size": 100}, {}),
    ({"num_heads": 3, "d_model": 24}, {"num_heads": 2, "d_model": 16}),
]

EXPERTS = [
    ({"n_group": 4, "num_experts": 256, "num_experts_per_tok": 3, "moe_topk": 65}, {"num_experts": 8}),
    ({"n_group": 3, "n_routed_experts": 256, "topk_group": 2}, {"n_routed_experts": 9}),
    ({"n_group": 3, "num_experts": 256, "num_experts_per_tok": 20}, {"num_experts": 42}),
    ({"num_local_experts": 256, "moe_topk": 64}, {"num_local_experts": 128}),
    ({"n_group": 3, "num_experts": 8}, {}),
    ({"n_group": 5, "num_experts": 64}, {"num_experts": 10}),
]

LENGTHS = [
    (
        {"sliding_window": [4096, None, 8], "max_position_embeddings": 131072, "window_layers": 5},
        {"sliding_window": [12, None, 8], "max_position_embeddings": 40},
        ((45, 43, 17, 15, 2, 9, 13, 3), (17, 15, 2, 9, 13, 3)),
    ),
    (
        {"text": {"attention_chunk_size": 8192}, "sliding_window": 1024, "floor_scale": 13},
        {"text": {"attention_chunk_size": 15}, "sliding_window": 11, "floor_scale": 7},
        ((20, 18, 2, 8, 12, 16, 3), (20, 18, 2, 8, 12, 16, 3)),
    ),
    (
        {"n_positions": 10, "max_seq_len": 2048, "n_ctx": 0},
        {"max_seq_len": 36},
        ((41, 39, 9, 7, 2, 3), (9, 7, 2, 3)),
    ),
    ({"sliding_window": 12, "n_ctx": 12}, {}, ((17, 15, 2, 13, 3), (17, 15, 2, 13, 3))),
    ({"sliding_window": 40, "n_ctx": 2}, {"sliding_window": 7}, ((7, 5, 12, 10, 2, 8, 3), (2, 2, 2, 2, 2))),
]


def _cut(cut, before, changes):
    values = deepcopy(before)
    cut(values)
    assert values == {**before, **changes}


def test_layers_are_the_first_ones_and_one_of_each_kind():
    hold_each(LAYERS, lambda case: _cut(small._fewer_layers, *case))


def test_widths_shrink_with_the_heads():
    hold_each(WIDTHS, lambda case: _cut(lambda values: small._narrower(values, few=2), *case))


def test_experts_are_enough_to_choose_among_in_groups_of_one_size():
    hold_each(EXPERTS, lambda case: _cut(small._fewer_experts, *case))


def test_lengths_keep_their_order_and_rows_reach_beyond_each():
    def check(case):
        before, changes, rows = case
        scale = small._scale(before)
        assert small._rows(scale) == rows

        def shorter(values):
            small._everywhere(values, lambda each: small._shorter(each, scale))

        _cut(shorter, before, changes)

    hold_each(LENGTHS, check)


def test_each_variant_leaves_more_alone():
    config = transformers.LlamaConfig(
        **{"hidden_size": 256, "num_attention_heads": 16, "num_key_value_heads": 4, "num_hidden_layers": 6},
        **{"intermediate_size": 512, "vocab_size": 600},
    )
    made = [small.small_config(config, variant).config for variant in range(small.VARIANTS)]
    sizes = [(one.num_hidden_layers, one.num_attention_heads, one.hidden_size) for one in made]
    assert sizes == [(2, 2, 32), (2, 8, 128), (6, 2, 32), (2, 16, 256), (6, 16, 256)]
    assert config.num_hidden_layers == 6
