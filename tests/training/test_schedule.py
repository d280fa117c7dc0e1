from argparse import Namespace
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.training.schedule import build_dp_schedule
from slime.utils.seqlen_balancing import (
    expand_bins_by_splitting,
    first_fit_pack,
    get_reverse_idx,
    get_seqlen_balanced_partitions,
)

SHAPE = dict(model_type="llama", num_layers=2, hidden_size=8, ffn_hidden_size=16, num_attention_heads=2)
SHAPE |= dict(num_query_groups=1, kv_channels=4, padded_vocab_size=32)


def _args(**overrides):
    flags = dict(use_dynamic_batch_size=True, max_tokens_per_gpu=64, micro_batch_size=1)
    return Namespace(**{**flags, "balance_data": False, "balance_by_flops": False, **SHAPE, **overrides})


def _config(dp_size):
    return dict(dp_size=dp_size, cp_size=1, vpp_size=1, microbatch_group_size_per_vp_stage=1)


@given(
    lengths=st.lists(st.integers(1, 80), min_size=8, max_size=24),
    dp_size=st.sampled_from([1, 2, 4]),
    steps=st.sampled_from([1, 2]),
    balance=st.booleans(),
    flops=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_every_sample_of_every_step_is_trained_exactly_once(lengths, dp_size, steps, balance, flops):
    size = len(lengths) // steps
    args = _args(balance_data=balance or flops, balance_by_flops=flops)
    schedule = build_dp_schedule(
        args, _config(dp_size), lengths, global_batch_size=size, rollout_indices=[*range(len(lengths))]
    )
    assert sorted(chain.from_iterable(schedule.partitions)) == [*range(size * steps)]
    assert schedule.global_batch_sizes == [size] * steps
    for partition, bins in zip(schedule.partitions, schedule.micro_batch_indices, strict=True):
        assert [*chain.from_iterable(bins)] == [*range(len(partition))]
        assert len(bins) == sum(schedule.num_microbatches)
        at = 0
        for step, count in enumerate(schedule.num_microbatches):
            for members in bins[at : at + count]:
                samples = [partition[i] for i in members]
                assert all(step * size <= sample < (step + 1) * size for sample in samples)
                tokens = sum(lengths[sample] for sample in samples)
                assert flops or size % dp_size or len(samples) == 1 or tokens <= 64
            at += count


def test_siblings_of_one_rollout_stay_in_one_step():
    schedule = build_dp_schedule(
        _args(), _config(1), [4] * 5, global_batch_size=1, rollout_indices=[7, 3, 7, 3, 7]
    )
    assert schedule.partitions == [[0, 2, 4, 1, 3]]
    assert schedule.global_batch_sizes == [1, 1]


def test_rollouts_that_fill_no_step_are_dropped():
    schedule = build_dp_schedule(
        _args(), _config(1), [4] * 5, global_batch_size=2, rollout_indices=[*range(5)]
    )
    assert sorted(schedule.partitions[0]) == [0, 1, 2, 3]


def test_static_micro_batches_are_consecutive_and_strided_over_ranks():
    args = _args(use_dynamic_batch_size=False, micro_batch_size=2)
    schedule = build_dp_schedule(args, _config(2), [4] * 8, global_batch_size=8, rollout_indices=[*range(8)])
    assert schedule.partitions == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert schedule.micro_batch_indices == [[[0, 1], [2, 3]]] * 2


def test_static_micro_batches_must_divide():
    args = _args(use_dynamic_batch_size=False, micro_batch_size=2)
    with pytest.raises(ValueError, match="--micro-batch-size 2"):
        build_dp_schedule(args, _config(2), [4] * 6, global_batch_size=6, rollout_indices=[*range(6)])


def test_a_step_needs_a_full_global_batch():
    with pytest.raises(ValueError, match="--global-batch-size 8"):
        build_dp_schedule(_args(), _config(1), [4] * 4, global_batch_size=8, rollout_indices=[*range(4)])


def test_first_fit_leaves_an_oversize_sample_alone():
    assert first_fit_pack([5, 12, 4, 1], cap=10) == [[0, 2, 3], [1]]


def test_the_largest_bin_is_split_first():
    assert sorted(map(sorted, expand_bins_by_splitting([[0, 1, 2], [3]], 3, [5, 4, 3, 20]))) == [
        [0],
        [1, 2],
        [3],
    ]


@given(st.lists(st.integers(0, 1000), min_size=4, max_size=40), st.sampled_from([1, 2, 4]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_partitions_cover_all_items_and_none_is_empty(costs, k, equal):
    costs = costs[: len(costs) // k * k]
    partitions = get_seqlen_balanced_partitions(costs, k, equal)
    assert sorted(chain.from_iterable(partitions)) == [*range(len(costs))]
    assert all(partitions)
    if equal:
        assert {len(partition) for partition in partitions} == {len(costs) // k}


def test_partitions_are_balanced():
    sums = [
        sum([8, 7, 6, 5, 4][i] for i in p) for p in get_seqlen_balanced_partitions([8, 7, 6, 5, 4], 2, False)
    ]
    assert sorted(sums) == [14, 16]


def test_reverse_index_inverts():
    assert get_reverse_idx([2, 0, 1]) == [1, 2, 0]


def test_too_few_samples_for_equal_shares_are_merged():
    schedule = build_dp_schedule(
        _args(), _config(2), [60, 61, 62, 63, 64], global_batch_size=5, rollout_indices=[*range(5)]
    )
    assert schedule.num_microbatches == [2]
    assert sorted(chain.from_iterable(schedule.partitions)) == [*range(5)]
