from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.schedule import above_bounds, make_args, make_lengths
from slime.training.schedule import build_dp_schedule
from slime.utils.seqlen_balancing import (
    expand_bins_by_splitting,
    first_fit_pack,
    get_reverse_idx,
    get_seqlen_balanced_partitions,
)
from tests.run_args import run_args

SHAPE = dict(model_type="llama", num_layers=2, hidden_size=8, ffn_hidden_size=16, num_attention_heads=2)
SHAPE |= dict(num_query_groups=1, kv_channels=4, padded_vocab_size=32)


def _args(**overrides):
    flags = dict(use_dynamic_batch_size=True, max_tokens_per_gpu=64, micro_batch_size=1)
    return run_args(**{**flags, "balance_data": False, "balance_by_flops": False, **SHAPE, **overrides})


def _config(dp_size, **layout):
    return dict(dp_size=dp_size, cp_size=1, vpp_size=1, microbatch_group_size_per_vp_stage=1) | layout


def _scheduled(lengths, dp_size=1, layout=None, **flags):
    """One step over samples of these lengths, each a rollout."""
    numbers = [*range(len(lengths))]
    return build_dp_schedule(
        _args(**flags),
        _config(dp_size, **(layout or {})),
        lengths,
        global_batch_size=len(lengths),
        rollout_indices=numbers,
    )


def _micro_batches(schedule):
    """Per rank, its micro-batches as samples."""
    return [
        [[partition[i] for i in indices] for indices in micro_batches]
        for partition, micro_batches in zip(schedule.partitions, schedule.micro_batch_indices, strict=True)
    ]


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


@pytest.mark.parametrize(("count", "micro_batch_size"), [(6, 2), (7, 1), (9, 2), (5, 4)])
def test_static_micro_batches_must_be_full_and_equally_many_on_all_ranks(count, micro_batch_size):
    wanted = f"{count} samples .* for 2 ranks; wanted a multiple of {2 * micro_batch_size}$"
    with pytest.raises(ValueError, match=wanted):
        _scheduled([4] * count, 2, use_dynamic_batch_size=False, micro_batch_size=micro_batch_size)


def test_a_step_needs_a_sample_for_each_rank():
    with pytest.raises(ValueError, match="step 0 has 2 samples, wanted at least dp_size 3"):
        _scheduled([4] * 2, 3)
    assert sorted(_micro_batches(_scheduled([4] * 3, 3))) == [[[0]], [[1]], [[2]]]


def test_micro_batches_fill_the_token_budget_of_all_context_parallel_ranks():
    lengths = [40, 30, 24, 30]
    assert _micro_batches(_scheduled(lengths)) == [[[0, 2], [1, 3]]]
    assert _micro_batches(_scheduled(lengths, layout={"cp_size": 2})) == [[[0, 1, 2, 3]]]


def test_virtual_stages_get_whole_groups_of_micro_batches():
    layout = {"microbatch_group_size_per_vp_stage": 3}
    assert _scheduled([60] * 8, 2, {**layout, "vpp_size": 1}).num_microbatches == [4]
    assert _scheduled([30] * 8, 2, {**layout, "vpp_size": 2}).num_microbatches == [3]
    assert _scheduled([60] * 8, 2, {**layout, "vpp_size": None}).num_microbatches == [4]
    with pytest.raises(ValueError, match="a step has 5 samples, wanted one for each of 6 micro-batches"):
        _scheduled([60] * 5, 2, {**layout, "vpp_size": 2})


def test_bins_by_flops_are_as_many_as_the_tokens_need_and_alike():
    flags = dict(balance_by_flops=True, balance_data=True)
    # 128 tokens in bins of 64; first-fit would put the three short ones together.
    assert sorted(map(sorted, _micro_batches(_scheduled([50, 30, 30, 18], **flags))[0])) == [[0, 3], [1, 2]]
    # More bins than samples there are not.
    assert _scheduled([200, 200], **flags).num_microbatches == [2]


def test_ranks_get_micro_batches_of_similar_cost_only_where_that_is_asked_for():
    lengths = [60, 10, 60, 10]
    flags = dict(use_dynamic_batch_size=False)
    assert _micro_batches(_scheduled(lengths, 2, **flags)) == [[[0], [2]], [[1], [3]]]
    balanced = _micro_batches(_scheduled(lengths, 2, **flags, balance_data=True))
    assert [sorted(lengths[i] for (i,) in rank) for rank in balanced] == [[10, 60], [10, 60]]


def test_too_few_samples_are_merged_into_the_smallest_bins():
    """Five bins for two ranks, of which five samples cannot fill six: the two cheapest become one."""
    schedule = _scheduled([64, 61, 40, 62, 63], 2)
    merged = [bin for rank in _micro_batches(schedule) for bin in rank if len(bin) > 1]
    assert merged == [[1, 2]] and schedule.num_microbatches == [2]


@pytest.mark.parametrize("flops", [False, True])
def test_bins_that_have_to_exceed_the_budget_are_alike(flops):
    """Ten samples in seven bins, for six ranks: six bins, of which none gets two of the longest."""
    lengths = [48, 45, 16, 8, 49, 50, 16, 57, 58, 11]
    schedule = _scheduled(lengths, 6, balance_by_flops=flops, balance_data=flops)
    assert schedule.num_microbatches == [1]
    assert max(sum(lengths[i] for i in bin) for rank in _micro_batches(schedule) for bin in rank) <= 66


def test_steps_may_have_different_numbers_of_micro_batches():
    lengths = [60, 60, 60, 60, 10, 10, 10, 10]
    schedule = build_dp_schedule(
        _args(), _config(2), lengths, global_batch_size=4, rollout_indices=[*range(8)]
    )
    assert schedule.num_microbatches == [2, 1] and schedule.global_batch_sizes == [4, 4]
    assert _micro_batches(schedule) == [[[0], [2], [4, 7]], [[1], [3], [5, 6]]]


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


@given(st.lists(st.integers(0, 1000), min_size=4, max_size=60), st.sampled_from([1, 2, 3, 4]))
@settings(max_examples=60, deadline=None)
def test_partitions_differ_by_no_more_than_one_item(costs, k):
    """What differencing guarantees: a merge leaves no wider a spread than its parts have."""
    loads = [sum(costs[i] for i in p) for p in get_seqlen_balanced_partitions(costs, k, False)]
    assert max(loads) - min(loads) <= max(costs)
    costs = costs[: len(costs) // k * k]
    loads = [sum(costs[i] for i in p) for p in get_seqlen_balanced_partitions(costs, k, True)]
    order = sorted(costs)
    assert max(loads) - min(loads) <= max(order[at + k - 1] - order[at] for at in range(0, len(order), k))


@pytest.mark.parametrize("dp_size", [2, 8])
@pytest.mark.parametrize("mode", ["balanced ranks", "balanced FLOPs"])
def test_a_large_rollout_is_within_a_hundredth_of_perfect_balance(mode, dp_size):
    lengths = make_lengths(4096)
    schedule = build_dp_schedule(
        make_args(mode), _config(dp_size), lengths, global_batch_size=4096, rollout_indices=range(4096)
    )
    bounds = above_bounds(make_args(mode), schedule, lengths)
    assert bounds["ranks"] < 1.01
    assert bounds["micro_batches"] < 1.01 or mode == "balanced ranks"


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("samples", [150, 256, 300])
def test_ranks_have_as_many_tokens_as_one_another_unasked(dp_size, samples):
    """First-fit would give two ranks bins of 8,192, 8,192 and 2,000 tokens, the first of them split."""
    lengths = [40 + i % 37 for i in range(samples)]
    schedule = _scheduled(lengths, dp_size, max_tokens_per_gpu=8192)
    ranks = [sum(lengths[i] for bin in rank for i in bin) for rank in _micro_batches(schedule)]
    assert max(ranks) <= 1.01 * sum(lengths) / dp_size
    assert schedule.num_microbatches == [-(-sum(lengths) // (8192 * dp_size))]


def test_bins_that_cannot_be_alike_within_the_budget_are_those_of_first_fit():
    """Two bins are full to the last token here; differencing would make one of 67."""
    lengths = [13, 38, 13, 16, 17, 31]
    assert _micro_batches(_scheduled(lengths)) == [[[0, 1, 2], [3, 4, 5]]]


def test_an_oversize_sample_is_alone_and_lends_its_room_to_no_other_bin():
    def loads(lengths):
        return sorted(sum(lengths[i] for i in bin) for bin in _micro_batches(_scheduled(lengths))[0])

    assert loads([80, *[10] * 9]) == [40, 50, 80]
    assert loads([80, 13, 38, 13, 16, 17, 31]) == [64, 64, 80]


def test_bins_by_flops_stay_alike_where_ranks_need_more_of_them():
    """Nine bins would do; that each of eight ranks has two, no bin is split into halves."""
    schedule = _scheduled([8] * 72, 8, balance_by_flops=True, balance_data=True)
    assert schedule.num_microbatches == [2]
    assert {len(bin) for rank in _micro_batches(schedule) for bin in rank} == {4, 5}


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_first_fit_takes_the_first_bin_with_room(lengths, cap):
    bins: list[list[int]] = []
    for i, length in enumerate(lengths):
        with_room = [b for b in bins if sum(lengths[j] for j in b) + length <= cap]
        if with_room:
            with_room[0].append(i)
        else:
            bins.append([i])
    assert first_fit_pack(lengths, cap) == bins


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
