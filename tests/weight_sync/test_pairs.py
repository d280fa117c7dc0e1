"""Tensors that engines join when they load them come together."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.weight_sync.filters.pairs import whole_pairs

LAYERS = [
    f"model.layers.{layer}.self_attn.{name}.weight"
    for layer in range(3)
    for name in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
]
ALONE = ["model.layers.9.self_attn.kv_a_proj_with_mqa.weight", "model.layers.8.self_attn.q_a_proj.weight"]


@given(st.lists(st.booleans(), min_size=len(LAYERS) + 2, max_size=len(LAYERS) + 2))
def test_each_tensor_is_sent_once_and_pairs_in_one_bucket(ends):
    buckets, bucket = [], []
    for name, end in zip([*LAYERS, *ALONE], ends, strict=True):
        bucket.append((name, torch.empty(0)))
        if end:
            buckets.append(bucket)
            bucket = []
    if bucket:
        buckets.append(bucket)
    sent = [[name for name, _ in each] for each in whole_pairs(buckets)]
    assert len(sent) - len(buckets) in (0, 1)  # others know how many it took for so many
    assert sorted(name for each in sent for name in each) == sorted([*LAYERS, *ALONE])
    for names in sent:
        first = {name for name in names if ".q_a_proj." in name and name not in ALONE}
        assert {name.replace("q_a_proj", "kv_a_proj_with_mqa") for name in first} <= {*names}


def test_several_may_wait():
    first, second = (
        [(f"model.layers.{layer}.self_attn.{name}.weight", torch.empty(0)) for layer in range(3)]
        for name in ("q_a_proj", "kv_a_proj_with_mqa")
    )
    buckets = [first, *([pair] for pair in second)]
    assert [*whole_pairs(buckets)] == [[], *([*pair] for pair in zip(first, second, strict=True))]
