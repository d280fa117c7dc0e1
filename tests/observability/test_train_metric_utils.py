import pytest
import torch

from slime.observability.timer import Timer
from slime.observability.train_metric_utils import perf_metrics, reduce_train_step_metrics, rollout_metrics


def _result(tokens, loss, kl):
    return {"keys": ["loss", "ppo_kl"], "values": torch.tensor([tokens, loss, kl])}


def test_a_step_is_the_mean_over_its_rollouts():
    metrics = reduce_train_step_metrics([_result(0.0, 4.0, 1.0), _result(0.0, 2.0, 0.0)], 4, None, False)
    assert metrics == {"loss": 1.5, "ppo_kl": 0.25}


def test_a_per_token_step_is_the_mean_over_its_tokens():
    metrics = reduce_train_step_metrics([_result(3.0, 4.0, 1.0), _result(5.0, 2.0, 0.0)], 4, None, True)
    assert metrics == {"loss": 0.75, "ppo_kl": 0.125}


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
        "rollout/raw_reward": 1.0,
        "rollout/truncated": pytest.approx(1 / 3),
    }


def test_throughput_counts_three_forward_passes_per_training_pass():
    metrics = perf_metrics({"actor_train": 2.0, "log_probs": 1.0}, 4e12, tokens=100, world_size=2)
    assert metrics == {
        "perf/actor_train_time": 2.0,
        "perf/log_probs_time": 1.0,
        "perf/log_probs_tflops": 2.0,
        "perf/actor_train_tflops": 3.0,
        "perf/actor_train_tok_per_s": 50.0,
    }


def test_a_timer_adds_up_and_starts_again():
    timer = Timer()
    for _ in range(2):
        with timer.measure("outer"), timer.measure("inner"):
            pass
    seconds = timer.take()
    assert seconds.keys() == {"outer", "inner"} and seconds["outer"] >= seconds["inner"] >= 0
    assert timer.take() == {}
