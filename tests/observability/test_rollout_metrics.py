import numpy as np
import pytest
import torch

from slime.config.run import run_config
from slime.observability.rollout_metrics import (
    compute_metrics_from_samples,
    compute_perf_metrics_from_samples,
    eval_log_metrics,
    rollout_log_metrics,
)
from slime.utils.types import EARLIER_TOKENS, Sample
from tests.run_args import with_groups


def make_args(**overrides):
    values = dict(
        reward_key=None, advantage_estimator="grpo", rollout_num_gpus=2, n_samples_per_eval_prompt=1,
        custom_rollout_log_function_path=None, custom_eval_rollout_log_function_path=None,
        log_passrate=False, log_reward_category=None, log_multi_turn=False, log_correct_samples=False,
        rollout_max_response_len=8, eval_datasets=[],
    )  # fmt: skip
    return with_groups(values | overrides)


def make_sample(group, reward, length=4, masked=0, **fields):
    mask = [0] * masked + [1] * (length - masked)
    return Sample(group_index=group, reward=reward, response_length=length, loss_mask=mask, **fields)


def test_lengths_count_trained_tokens_only():
    samples = [make_sample(0, 1.0, length=6, masked=2), make_sample(0, 0.0, length=2)]
    metrics = compute_metrics_from_samples(make_args(), samples)
    assert metrics["response_len/mean"] == 3.0
    assert metrics["response_len/max"] == 4.0


def test_groups_without_signal_are_counted_by_their_reward():
    rewards = {0: [1.0, 1.0], 1: [0.0, 1.0], 2: [0.0, 0.0], 3: [1.0, 1.0]}
    samples = [make_sample(group, reward) for group, values in rewards.items() for reward in values]
    metrics = compute_metrics_from_samples(make_args(), samples)
    assert metrics["zero_std/count_1.0"] == 2
    assert metrics["zero_std/count_0.0"] == 1
    assert metrics["flat_groups"] == 3 / 4
    assert metrics["raw_reward"] == pytest.approx(5 / 8)


def test_whole_number_rewards_keep_their_names():
    samples = [make_sample(group, reward) for group, reward in ((0, 1), (0, 1), (1, 0), (1, 0), (2, -1))]
    metrics = compute_metrics_from_samples(make_args(), samples)
    names = {name for name in metrics if name.startswith("zero_std")}
    assert names == {"zero_std/count_1", "zero_std/count_0", "zero_std/count_-1"}


def test_groups_of_one_sample_are_no_groups_without_signal():
    alone = [make_sample(group, 1.0) for group in range(3)]
    assert "flat_groups" not in compute_metrics_from_samples(make_args(), alone)
    several = [*alone, make_sample(3, 1.0), make_sample(3, 0.0)]
    assert compute_metrics_from_samples(make_args(), several)["flat_groups"] == 0


def test_a_group_that_lost_a_sample_still_has_a_pass_rate():
    samples = [
        make_sample(0, 1.0),
        make_sample(1, 0.0),
        make_sample(1, 1.0),
        make_sample(0, 0.0),
        make_sample(2, 1),
    ]
    data = {"arith": {"rewards": [sample.reward for sample in samples], "samples": samples}}
    assert eval_log_metrics(0, run_config(make_args(log_passrate=True)), data)["eval/arith"] == 0.6
    data["arith"]["samples"] = samples[:4]
    data["arith"]["rewards"] = data["arith"]["rewards"][:4]
    assert eval_log_metrics(0, run_config(make_args(log_passrate=True)), data)["eval/arith-pass@2"] == 1.0


def test_truncation_and_reward_categories_are_shares():
    samples = [
        make_sample(0, {"score": 1.0, "error": "none"}, status=Sample.Status.TRUNCATED),
        make_sample(0, {"score": 0.0, "error": "format"}, status=Sample.Status.COMPLETED),
    ]
    args = make_args(reward_key="score", log_reward_category="error")
    metrics = compute_metrics_from_samples(args, samples)
    assert metrics["truncated_ratio"] == 0.5
    assert metrics["error_cat/format"] == 0.5
    assert metrics["raw_reward"] == 0.5


def test_named_sources_have_a_share_and_a_mean_reward():
    samples = [make_sample(group, group / 2, metadata={"source_name": "ab"[group > 1]}) for group in range(3)]
    metrics = compute_metrics_from_samples(make_args(), [*samples, make_sample(3, 4.0)])
    found = {key: value for key, value in metrics.items() if key.startswith("source/")}
    assert found == {
        **{"source/a/share": 0.5, "source/a/raw_reward": 0.25},
        **{"source/b/share": 0.25, "source/b/raw_reward": 1.0},
        **{"source/unknown/share": 0.25, "source/unknown/raw_reward": 4.0},
    }
    assert not any(
        key.startswith("source/") for key in compute_metrics_from_samples(make_args(), [make_sample(0, 1.0)])
    )


def test_speed_leaves_out_masked_tokens_and_tool_time_where_it_says_so():
    samples = [
        make_sample(0, 1.0, length=8, masked=4, non_generation_time=1.0),
        make_sample(0, 1.0, length=2),
    ]
    perf = compute_perf_metrics_from_samples(make_args(), samples, rollout_time=2.0)
    assert perf["tokens_per_gpu_per_sec"] == 10 / 2.0 / 2
    assert perf["effective_tokens_per_gpu_per_sec"] == 6 / 2.0 / 2
    assert perf["longest_sample_tokens_per_sec"] == 4.0
    assert perf["longest_sample_tokens_per_sec_without_non_generation"] == 8.0
    assert perf["non_generation_time/max"] == 1.0


def test_speed_counts_the_tokens_of_this_rollout():
    """Of a response that an earlier one began the rest; nothing of one that it finished."""
    gone_on = make_sample(0, 1.0, length=8, masked=2, metadata={EARLIER_TOKENS: 5})
    finished = make_sample(0, 1.0, length=6, metadata={EARLIER_TOKENS: 6})
    samples = [gone_on, finished, make_sample(0, 1.0, length=2)]
    perf = compute_perf_metrics_from_samples(make_args(), samples, rollout_time=2.0)
    assert perf["tokens_per_gpu_per_sec"] == perf["effective_tokens_per_gpu_per_sec"] == (3 + 0 + 2) / 2.0 / 2
    assert perf["longest_sample_tokens_per_sec"] == 3 / 2.0


def test_speed_by_gpu_is_of_those_that_engines_have():
    samples = [make_sample(0, 1.0, length=8)]
    rates = [
        compute_perf_metrics_from_samples(make_args(), samples, 2.0, gpus)["tokens_per_gpu_per_sec"]
        for gpus in (None, 4)
    ]
    assert rates == [8 / 2.0 / 2, 8 / 2.0 / 4]
    found = rollout_log_metrics(0, run_config(make_args()), samples, {}, 2.0, 4)
    assert found["perf/tokens_per_gpu_per_sec"] == rates[1]


def test_rollout_metrics_carry_their_full_names():
    metrics = rollout_log_metrics(
        0, run_config(make_args()), [make_sample(0, 1.0)], {"rollout/dynamic_filter/drop_x": 3}, 2.0
    )
    assert metrics["rollout/dynamic_filter/drop_x"] == 3
    assert metrics["rollout/response_len/mean"] == 4.0
    assert metrics["perf/rollout_time"] == 2.0


def test_an_evaluation_has_rewards_of_its_own():
    args = make_args(reward_key="score", eval_reward_key="acc")
    data = {"arith": {"rewards": [1.0], "samples": [make_sample(0, {"acc": 1.0})]}}
    assert eval_log_metrics(0, run_config(args), data)["eval/arith/raw_reward"] == 1.0


def test_rollouts_have_the_pass_rate_of_their_groups_if_it_is_asked_for():
    rewards = {7: [1.0, 0.0], 9: [0.0, 0.0], 8: [1.0, 1.0], 3: [0.0, 1.0]}
    samples = [make_sample(group, {"acc": r}) for group, values in rewards.items() for r in values]
    with_rate = rollout_log_metrics(
        0, run_config(make_args(log_passrate=True, reward_key="acc")), samples, {}, 1.0
    )
    assert with_rate["passrate/pass@1"] == 0.5
    assert with_rate["passrate/pass@2"] == 0.75
    without = rollout_log_metrics(0, run_config(make_args(reward_key="acc")), samples, {}, 1.0)
    assert not any(name.startswith("passrate/") for name in without)


def test_eval_metrics_follow_the_dataset_name():
    samples = [make_sample(i // 2, float(i % 2)) for i in range(4)]
    data = {
        "arith": {
            "rewards": [0.0, 1.0, 0.0, 1.0],
            "truncated": [False, True, False, False],
            "samples": samples,
        }
    }
    args = make_args(log_passrate=True, n_samples_per_eval_prompt=2)
    metrics = eval_log_metrics(0, run_config(args), data)
    assert metrics["eval/arith"] == 0.5
    assert metrics["eval/arith-truncated_ratio"] == 0.25
    assert metrics["eval/arith-pass@2"] == 1.0
    assert metrics["eval/arith/response_len/mean"] == 4.0


def always_true(*_):
    return True


def always_false(*_):
    return False


@pytest.mark.parametrize(("hook", "expect_default"), [("always_true", False), ("always_false", True)])
def test_a_logging_hook_can_replace_the_default(hook, expect_default, monkeypatch):
    monkeypatch.setattr("slime.observability.rollout_metrics.load_function", lambda path: globals()[path])
    args = make_args(custom_rollout_log_function_path=hook, custom_eval_rollout_log_function_path=hook)
    assert bool(rollout_log_metrics(0, run_config(args), [make_sample(0, 1.0)], None, 1.0)) == expect_default
    assert bool(eval_log_metrics(0, run_config(args), {"x": {"rewards": [1.0]}})) == expect_default


@pytest.mark.parametrize("kind", [np.float32, torch.tensor, np.array])
def test_rewards_of_numpy_and_torch_are_numbers(kind):
    """Reward models give them, and their curve must not go missing."""
    samples = [make_sample(0, kind(1.0)), make_sample(0, kind(1.0))]
    args = make_args(log_passrate=True)
    metrics = rollout_log_metrics(0, run_config(args), samples, None, rollout_time=1.0)
    assert metrics["rollout/raw_reward"] == 1.0 and metrics["rollout/zero_std/count_1.0"] == 1
    assert metrics["passrate/pass@1"] == 1.0
    data = {"d": {"rewards": [kind(0.5), kind(1.5)], "samples": samples}}
    assert eval_log_metrics(0, run_config(args), data)["eval/d/raw_reward"] == 1.0


def test_the_size_of_nuclei_is_told_of_tokens_that_have_one():
    nuclei = dict(rollout_top_p_token_ids=[1, 2, 3, 4, 5, 6], rollout_top_p_token_offsets=[0, 2, 2, 6])
    samples = [make_sample(0, 1.0, 3, **nuclei), make_sample(0, 1.0, 2)]
    assert compute_metrics_from_samples(make_args(), samples)["top_p_kept_vocab_per_token"] == 3.0
    assert "top_p_kept_vocab_per_token" not in compute_metrics_from_samples(make_args(), samples[1:])


def test_of_several_adapters_each_has_a_share_and_a_mean_reward():
    samples = [
        make_sample(group, group / 2, metadata={"lora_adapter": "ab"[group > 1]}) for group in range(3)
    ]
    shown = lambda **flags: {
        key: value
        for key, value in compute_metrics_from_samples(make_args(**flags), samples).items()
        if key.startswith("adapter/")
    }
    assert shown(lora_rank=8, lora_adapters=["a", "b"]) == {
        **{"adapter/a/share": 2 / 3, "adapter/a/raw_reward": 0.25},
        **{"adapter/b/share": 1 / 3, "adapter/b/raw_reward": 1.0},
    }
    assert shown() == shown(lora_adapters=["a", "b"]) == {}
