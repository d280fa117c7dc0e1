"""Groups of which nothing comes end the run after so many in a row."""

import pytest

from slime.rollout import fruitless
from slime.rollout.base_types import GradingFailed
from slime.rollout.fruitless import FruitlessGroups, NothingToTrainOn
from slime.rollout.fully_async_rollout import generate_rollout_fully_async
from slime.rollout.sglang_rollout import generate_rollout_async
from slime.rollout.ungraded import mark_ungraded
from slime.utils.types import Sample

ABORTED = [[Sample(index=3, status=Sample.Status.ABORTED)], Sample(index=4, reward=1.0)]
GRADED = [Sample(index=7, reward=0.0, status=Sample.Status.COMPLETED)]


def ungraded():
    samples = [Sample(index=5), Sample(index=6)]
    for sample in samples:
        mark_ungraded(sample, "it hung")
    return samples


@pytest.fixture
def groups(monkeypatch):
    monkeypatch.setattr(fruitless, "MAX_IN_A_ROW", 4)
    return FruitlessGroups(2)


@pytest.mark.parametrize(
    ("group", "said"),
    [
        (ABORTED, r"^8 groups in a row had a sample that its .* aborted, the last one samples \[3, 4\]: the"),
        (
            ungraded(),
            r"^8 groups in a row could not be graded, .* samples \[5, 6\] \(it hung\): the",
        ),
    ],
)
def test_so_many_in_a_row_end_the_run_by_name(groups, group, said):
    for _ in range(7):
        groups.see(group)
    with pytest.raises(NothingToTrainOn, match=said):
        groups.see(group)


def test_both_kinds_count_together_and_a_group_with_a_grade_begins_anew(groups):
    for group in [ABORTED, ungraded(), *[ABORTED] * 5, GRADED, *[ABORTED] * 3, *[ungraded()] * 4]:
        groups.see(group)
    with pytest.raises(NothingToTrainOn, match=r"^8 .* 4 had a .* aborted and 4 could not be graded"):
        groups.see(ABORTED)


async def never(args, sample, **kwargs):
    raise GradingFailed("it hung")


async def test_a_rollout_of_which_nothing_can_be_graded_ends(engine, make_args, make_source, monkeypatch):
    monkeypatch.setattr(fruitless, "MAX_IN_A_ROW", 2)
    args = make_args(custom_rm_path=f"{__name__}.never")
    source = make_source(args)
    with pytest.raises(NothingToTrainOn, match=r"could not be graded, .* \(it hung\)"):
        await generate_rollout_async(args, 0, source)
    assert source.ledger.filtered == 2 * args.over_sampling_batch_size - 1


def test_so_does_one_that_is_made_ahead(engine, make_args, make_source, monkeypatch):
    monkeypatch.setattr(fruitless, "MAX_IN_A_ROW", 2)
    args = make_args(custom_rm_path=f"{__name__}.never", sglang_server_concurrency=2)
    with pytest.raises(NothingToTrainOn, match="could not be graded"):
        generate_rollout_fully_async(args, 0, make_source(args))
