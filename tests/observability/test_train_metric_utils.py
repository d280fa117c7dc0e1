import torch

from slime.observability.timer import Timer
from slime.observability.train_metric_utils import perf_metrics, reduce_train_step_metrics


def _result(tokens, loss, kl):
    return {"keys": ["loss", "ppo_kl"], "values": torch.tensor([tokens, loss, kl])}


def test_a_step_is_the_mean_over_its_rollouts():
    metrics = reduce_train_step_metrics(
        [_result(0.0, 4.0, 1.0), _result(0.0, 2.0, 0.0)],
        calculate_per_token_loss=False,
        step_global_batch_size=4,
        cp_size=1,
        dp_with_cp_group=None,
    )
    assert metrics == {"loss": 1.5, "ppo_kl": 0.25}


def test_a_per_token_step_is_the_mean_over_its_tokens():
    metrics = reduce_train_step_metrics(
        [_result(3.0, 4.0, 1.0), _result(5.0, 2.0, 0.0)],
        calculate_per_token_loss=True,
        step_global_batch_size=4,
        cp_size=1,
        dp_with_cp_group=None,
    )
    assert metrics == {"loss": 0.75, "ppo_kl": 0.125}


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
