import pytest

from slime.config.run import run_config
from slime.observability.rollout_metrics import rollout_log_metrics
from slime.observability.sample_metrics import (
    agent_metrics,
    correct_metrics,
    multi_turn_metrics,
    request_metrics,
)
from slime.utils.types import Sample
from tests.observability.test_rollout_metrics import make_args, make_sample


def test_turns_and_lengths_with_and_without_what_tools_said():
    samples = [
        make_sample(0, 1.0, length=8, masked=3, metadata={"round_number": 2}),
        make_sample(0, 0.0, length=4, metadata={"round_number": 1}),
    ]
    metrics = multi_turn_metrics(run_config(make_args(rollout_max_response_len=8)).rollout, samples)
    assert metrics == {
        "raw_response_length/response_length_mean": 6.0,
        "raw_response_length/response_length_max": 8.0,
        "raw_response_length/response_length_min": 4.0,
        "raw_response_length/response_length_clip_ratio": 0.5,
        "wo_obs_response_length/response_length_mean": 4.5,
        "wo_obs_response_length/response_length_max": 5.0,
        "wo_obs_response_length/response_length_min": 4.0,
        "multi_turn_metric/round_number_mean": 1.5,
        "multi_turn_metric/round_number_max": 2.0,
        "multi_turn_metric/round_number_min": 1.0,
    }


def test_without_a_round_number_everywhere_turns_are_not_counted():
    samples = [make_sample(0, 1.0, metadata={"round_number": 2}), make_sample(0, 0.0)]
    metrics = multi_turn_metrics(run_config(make_args(rollout_max_response_len=None)).rollout, samples)
    assert not any("round_number" in name or "clip_ratio" in name for name in metrics)


def test_what_agents_did_is_counted_by_execution():
    """One of two chains, and two that are a sample each, as those of two groups with the same index."""
    samples = [
        make_sample(0, 1.0, index=3, rollout_id=3, metadata={"round_number": 4, "tool_errors": 2}),
        make_sample(
            0, 1.0, index=3, rollout_id=3, metadata={"round_number": 1, "duplicated_prefix_tokens": 30}
        ),
        make_sample(0, 0.0, index=4, metadata={"round_number": 2, "realigned_tokens": 6}),
        make_sample(1, 0.0, index=4, metadata={"round_number": 2}),
        make_sample(1, 0.0, index=5),
    ]
    assert agent_metrics(samples) == {
        **{"chains": 4 / 3, "turns": 3.0, "realigned_tokens": 2.0, "duplicated_prefix_tokens": 10.0},
        "tool_errors": 2 / 3,
    }
    assert agent_metrics(samples[-1:]) == {}
    metrics = rollout_log_metrics(0, run_config(make_args()), samples, None, 1.0)
    assert metrics["rollout/agent/turns"] == 3.0


def test_correct_samples_have_percentiles_of_length_and_an_entropy():
    correct = [
        make_sample(0, 1.0, length=4, masked=2, rollout_log_probs=[0.0, 0.0, -1.0, -2.0]),
        make_sample(0, 1.0, length=6, rollout_log_probs=[-0.5] * 6),
    ]
    metrics = correct_metrics(correct)
    assert metrics["correct_length/p25"] == 3.0
    assert metrics["correct_length/p100"] == 6.0
    assert metrics["correct_entropy"] == pytest.approx((1 + 2 + 6 * 0.5) / 8)
    assert correct_metrics([]) == {}


def test_what_engines_measured_is_named_by_its_phase():
    first, second = make_sample(0, 1.0, length=0), make_sample(0, 1.0, length=0)
    for sample, latency in ((first, 1.0), (second, 3.0)):
        meta = {"e2e_latency": latency, "queue_time": 0.5, "decode_throughput": 40.0, "id": "x"}
        meta |= {"pd_prefill_bootstrap_duration": 0.25, "finish_reason": {"type": "stop"}}
        sample.append_response_tokens(tokens=[1], log_probs=[-1.0], meta_info=meta)
    metrics = request_metrics([first, second])
    assert metrics["request/e2e_latency/mean"] == 2.0 and metrics["request/e2e_latency/max"] == 3.0
    assert metrics["request/queue_time/median"] == 0.5
    assert metrics["decode/throughput/min"] == 40.0
    assert metrics["prefill/bootstrap_duration/mean"] == 0.25
    assert not any("id" in name.split("/") for name in metrics)
    assert Sample.from_dict(first.to_dict()).request_times == first.request_times


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("log_multi_turn", "multi_turn/wo_obs_response_length/response_length_mean"),
        ("log_correct_samples", "rollout/correct_length/p50"),
    ],
)
def test_flags_ask_for_them(flag, name):
    samples = [make_sample(0, 1.0), make_sample(0, 0.0)]
    assert name in rollout_log_metrics(0, run_config(make_args(**{flag: True})), samples, {}, 1.0)
    assert name not in rollout_log_metrics(0, run_config(make_args()), samples, {}, 1.0)
