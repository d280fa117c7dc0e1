"""Averages of a rollout's fields."""

import pytest
import torch

from slime.training.metrics import rollout_metrics


def test_a_rollout_is_averaged_over_tokens_then_rollouts():
    data = {
        "tokens": [torch.zeros(4), torch.zeros(3), torch.zeros(3)],
        "log_probs": [torch.tensor([-1.0, -3.0]), torch.tensor([-9.0]), torch.tensor([-4.0])],
        "loss_masks": [torch.tensor([1, 1]), torch.tensor([0]), torch.tensor([1])],
        # The last two samples are one rollout.
        "rollout_mask_sums": torch.tensor([2.0, 1.0, 1.0]),
        "rewards": [1.0, 0.0, 0.5],
        "raw_reward": [5.0] * 6,
        "local_raw_reward": [1, 0, 2],
        "truncated": [1, 0, 0],
    }
    metrics = rollout_metrics(data, num_rollouts=2, group=None)
    assert metrics == {
        "rollout/log_probs": -3.0,
        "rollout/rewards": 0.5,
        "rollout/truncated": pytest.approx(1 / 3),
    }


def test_rewards_that_are_no_numbers_have_no_average():
    data = {
        "tokens": [torch.zeros(4), torch.zeros(3)],
        "rewards": [[0.5, 1.0], [0.0]],
        "raw_reward": [1.0, 3.0],
        "local_raw_reward": [1.0, 3.0],
    }
    assert rollout_metrics(data, num_rollouts=2, group=None) == {}


def test_numbers_that_a_conversion_adds_are_averaged_over_samples():
    data = {
        "tokens": [torch.zeros(4), torch.zeros(3)],
        "raw_reward": ["good"],
        "local_raw_reward": ["good", "bad"],
        "difficulty": [1, 4],
        "share": torch.tensor([0.5, 1.0]),
        "source_names": ["a", "b"],
        "of_the_whole_batch": [1.0, 2.0, 3.0],
        "partition": [0, 1],
        "note": "text",
    }
    metrics = rollout_metrics(data, num_rollouts=2, group=None)
    assert metrics == {"rollout/difficulty": 2.5, "rollout/share": 0.75}
