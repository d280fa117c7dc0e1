from itertools import combinations

import pytest

from slime.observability.metric_utils import (
    compression_ratio,
    compute_pass_rate,
    compute_rollout_step,
    compute_statistics,
    has_repetition,
    pass_rate_of_groups,
)
from tests.run_args import run_args


def test_statistics_of_an_even_number_of_values():
    assert compute_statistics([4, 1, 3, 2]) == {"mean": 2.5, "median": 2.5, "max": 4.0, "min": 1.0}


def test_pass_at_k_is_the_share_of_k_subsets_with_a_correct_sample():
    groups = [[1, 0, 0, 0], [1, 1, 0, 0]]
    metrics = compute_pass_rate([reward for group in groups for reward in group], group_size=4)
    for k in (1, 2, 4):
        expected = sum(sum(map(any, combinations(g, k))) / len(list(combinations(g, k))) for g in groups) / 2
        assert metrics[f"pass@{k}"] == pytest.approx(expected)
    assert set(metrics) == {"pass@1", "pass@2", "pass@4"}


def test_pass_rate_is_empty_for_single_samples():
    assert compute_pass_rate([1.0, 0.0], group_size=1) == {}


def test_pass_at_k_of_uneven_groups_goes_as_far_as_the_smallest():
    groups = [[1, 0, 0], [0, 1, 0, 0, 1, 0]]
    metrics = pass_rate_of_groups(groups)
    for k in (1, 2):
        expected = sum(sum(map(any, combinations(g, k))) / len(list(combinations(g, k))) for g in groups) / 2
        assert metrics[f"pass@{k}"] == pytest.approx(expected)
    assert set(metrics) == {"pass@1", "pass@2"}


def test_pass_rate_refuses_incomplete_groups():
    with pytest.raises(ValueError, match="3 rewards do not fill 1 groups of 2"):
        compute_pass_rate([1, 0, 1], group_size=2)


def test_repetition_needs_a_long_and_repetitive_text():
    varied = "".join(str(number * 7919 % 10007) for number in range(4000))
    assert has_repetition("abc" * 4000)
    assert not has_repetition("abc" * 10)
    assert not has_repetition(varied)
    assert compression_ratio("") == 0.0


def test_rollout_step_counts_optimizer_steps_when_asked():
    args = run_args(
        wandb_always_use_train_step=False, rollout_batch_size=8, n_samples_per_prompt=4, global_batch_size=16
    )
    assert compute_rollout_step(args, 5) == 5
    args.wandb_always_use_train_step = True
    assert compute_rollout_step(args, 5) == 10
