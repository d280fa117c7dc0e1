"""Groups that are finished when the batch is full."""

import pytest

from slime.rollout.base_types import RolloutError
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.sglang_rollout import generate_rollout_async
from slime.rollout.weight_versions import check_weight_versions
from slime.utils.types import Sample
from tests.engines.fake import NEVER
from tests.rollout import plugins
from tests.rollout.test_sglang_rollout import PLUGINS, balanced, question

INSTANT = dict(
    over_sampling_batch_size=5,
    custom_generate_function_path=PLUGINS + "instant_generate",
    keep_surplus_groups=True,
)


def numbers(groups):
    return [group[0].group_index for group in groups]


async def two_rollouts(args, source):
    """Group numbers of the batches, and of what waits after the first; all are generated at once."""
    first = await generate_rollout_async(args, 0, source)
    waiting = numbers(getattr(source, "buffer", []))
    second = await generate_rollout_async(args, 1, source)
    return numbers(first.samples), waiting, numbers(second.samples)


async def test_surplus_groups_are_used_as_they_are_by_the_next_rollout(engine, make_args, make_source):
    args = make_args(**INSTANT, group_rm=True, custom_rm_path=PLUGINS + "group_rm")
    source = make_source(args)
    first, waiting, second = await two_rollouts(args, source)
    assert sorted(first + waiting) == [0, 1, 2, 3, 4]
    assert second[:2] == sorted(waiting)
    generated = [call for call in plugins.calls if isinstance(call, int)]
    assert len(generated) == len(set(generated)), "a finished group was generated again"
    scored = [tuple(call) for call in plugins.calls if isinstance(call, list)]
    assert len(scored) == len(set(scored)), "a finished group was scored again"
    assert source.ledger.trained == 6 and not source.ledger.dropped
    assert balanced(source)


async def test_surplus_groups_outlive_a_restart_with_rewards_and_versions(engine, make_args, make_source):
    args = make_args(**INSTANT)
    source = make_source(args)
    await generate_rollout_async(args, 0, source)
    waiting = list(source.buffer)
    source.save(0)
    source = make_source(args)
    source.load(0)
    output = await generate_rollout_async(args, 1, source)
    assert output.samples[:2] == waiting
    assert {s.reward for group in waiting for s in group} == {1.0}
    assert {s.metadata["start_rollout_id"] for group in waiting for s in group} == {0}


async def test_surplus_groups_are_dropped_unless_a_flag_keeps_them(engine, make_args, make_source):
    args = make_args(**INSTANT | {"keep_surplus_groups": False})
    source = make_source(args)
    output = await generate_rollout_async(args, 0, source)
    assert output.metrics == {"rollout/dropped/surplus": 2}
    assert source.ledger.dropped == {"surplus": 2} and source.get_buffer_length() == 0
    assert balanced(source)


@pytest.mark.parametrize("kind", [RolloutDataSource, plugins.BareSource])
async def test_a_source_that_keeps_nothing_gets_nothing_back(engine, make_args, kind):
    args = make_args(**INSTANT, n_samples_per_prompt=1)
    source = kind(args)
    first, _, second = await two_rollouts(args, source)
    assert len(first) == len(second) == 3
    assert min(second) == 5


async def test_groups_of_which_nothing_would_be_trained_on_are_not_kept(engine, make_args, make_source):
    args = make_args(**INSTANT, partial_rollout=True, mask_offpolicy_in_partial_rollout=True)
    source = make_source(args)
    output = await generate_rollout_async(args, 0, source)
    kept = {s.index for group in source.buffer for s in group}
    assert output.metrics.get("rollout/dropped/surplus", 0) + len(source.buffer) == 2
    assert balanced(source) and len(kept) == 2 * len(source.buffer)


async def test_where_surplus_fills_the_batch_nothing_is_begun(engine, make_args, make_source):
    args = make_args(**INSTANT | {"over_sampling_batch_size": 8})
    source = make_source(args)
    await generate_rollout_async(args, 0, source)
    assert source.get_buffer_length() == 5
    plugins.calls.clear()
    args.over_sampling_batch_size = 7
    output = await generate_rollout_async(args, 1, source)
    assert plugins.calls == []
    assert len(output.samples) == 3 and source.get_buffer_length() == 4
    assert balanced(source)
    assert numbers(source.buffer) == sorted(numbers(source.buffer))
    pending = [s.status for group in source.buffer for s in group if s.group_index >= 8]
    assert pending == [Sample.Status.PENDING] * 4


async def test_the_filter_judges_a_surplus_group_once_when_it_is_used(engine, make_args, make_source):
    args = make_args(
        **INSTANT,
        dynamic_sampling_filter_path=PLUGINS + "drop_odd_groups",
        rollout_all_samples_process_path=PLUGINS + "note_all",
    )
    source = make_source(args)
    seen = []
    for rollout_id in range(3):
        output = await generate_rollout_async(args, rollout_id, source)
        assert all(number % 2 == 0 for number in numbers(output.samples))
        seen += plugins.calls.pop()
    assert len(seen) == len(set(seen)) == source.ledger.filtered + 9
    assert balanced(source)


async def test_what_waits_for_the_next_rollout_waits_in_its_order(engine, make_args, make_source):
    own = {"custom_generate_function_path": PLUGINS + "slow_first_generate", "partial_rollout": True}
    source = make_source(args := make_args(**INSTANT | own))
    output = await generate_rollout_async(args, 0, source)
    assert numbers(output.samples) == [1, 2, 3]
    assert numbers(source.buffer) == [0, 4]


async def test_samples_that_were_split_are_kept_too(engine, make_args, make_source):
    args = make_args(
        **INSTANT | {"custom_generate_function_path": PLUGINS + "instant_split_generate"},
        custom_rm_path=PLUGINS + "split_rm",
    )
    source = make_source(args)
    await generate_rollout_async(args, 0, source)
    waiting = list(source.buffer)
    assert [[len(split) for split in group] for group in waiting] == [[2, 2]] * 2
    output = await generate_rollout_async(args, 1, source)
    assert output.samples[:2] == waiting
    assert balanced(source)


async def test_partial_rollouts_go_on_with_surplus_groups_too(engine, make_args, make_source):
    args = make_args(**INSTANT | {"keep_surplus_groups": False, "partial_rollout": True})
    _, waiting, second = await two_rollouts(args, make_source(args))
    assert len(waiting) == 2 and second[:2] == sorted(waiting)


async def test_a_group_that_finishes_while_others_are_aborted_is_surplus(engine, make_args, make_source):
    args = make_args(over_sampling_batch_size=5, keep_surplus_groups=True)
    engine.delay = lambda conversation: 0.0 if question(conversation) < 4 else NEVER
    source = make_source(args)
    first = await generate_rollout_async(args, 0, source)
    kept = numbers(first.samples) + numbers(source.buffer)
    assert set(kept) <= {0, 1, 2, 3}
    assert source.ledger.dropped["aborted"] == 5 - len(kept)
    assert balanced(source)


def test_only_samples_that_an_earlier_rollout_began_may_be_older():
    begun = Sample(index=1, weight_versions=["3"], metadata={"start_rollout_id": 0})
    check_weight_versions([begun], "4", allow_older=False)
    with pytest.raises(RolloutError, match=r"sample 1 .*version '3'"):
        check_weight_versions([Sample(index=1, weight_versions=["3"])], "4", allow_older=False)
    with pytest.raises(RolloutError, match=r"version '5'"):
        begun.weight_versions = ["5"]
        check_weight_versions([begun], "4", allow_older=False)
