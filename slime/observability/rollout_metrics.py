"""Metrics of generated samples. Functions of samples, so that they can be tested without a cluster."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from slime.config.cluster import ClusterConfig
from slime.config.metrics import MetricsConfig
from slime.config.run import run_config
from slime.observability.metric_utils import (
    compute_pass_rate,
    compute_statistics,
    dict_add_prefix,
    has_repetition,
    pass_rate_of_groups,
)
from slime.observability.sample_metrics import (
    agent_metrics,
    correct_metrics,
    multi_turn_metrics,
    request_metrics,
)
from slime.utils.misc import load_function, plain_number
from slime.utils.types import EARLIER_TOKENS, Sample


def rollout_log_metrics(
    rollout_id: int,
    config: MetricsConfig,
    samples: Sequence[Sample],
    extra_metrics: Mapping[str, Any] | None,
    rollout_time: float,
    gpus: int | None = None,
) -> dict[str, Any]:
    """All metrics of one training rollout, under their full names (``rollout/...``, ``perf/...``).

    ``rollout_time`` is in seconds, ``gpus`` as below. Empty when ``--custom-rollout-log-function-path`` did
    the logging.
    """
    hook = config.rollout.custom_rollout_log_function_path
    if hook and _logged_by(hook, rollout_id, config.flat, samples, extra_metrics, rollout_time):
        return {}
    perf = {"rollout_time": rollout_time} | compute_perf_metrics_from_samples(
        config.cluster, samples, rollout_time, gpus
    )
    metrics = {
        **(extra_metrics or {}),
        **dict_add_prefix(metrics_of_samples(config, samples), "rollout/"),
        **dict_add_prefix(agent_metrics(samples), "rollout/agent/"),
        **dict_add_prefix(perf, "perf/"),
    }
    if config.tracking.log_passrate:
        metrics |= dict_add_prefix(_pass_rate(config, samples), "passrate/")
    if config.tracking.log_multi_turn:
        metrics |= dict_add_prefix(multi_turn_metrics(config.rollout, samples), "multi_turn/")
    return metrics | (_correct(config, samples) if config.tracking.log_correct_samples else {})


def _logged_by(hook: str, *arguments: Any) -> bool:
    """Whether the user's function wants no other log.

    Raises:
        RuntimeError: it failed; the message names it.
    """
    try:
        return bool(load_function(hook)(*arguments))
    except Exception as error:
        raise RuntimeError(f"{hook} failed: {type(error).__name__}: {error}") from error


def _correct(config: MetricsConfig, samples: Sequence[Sample]) -> dict[str, float]:
    rewards = _rewards(config, samples)
    correct = [sample for sample, reward in zip(samples, rewards, strict=True) if reward == 1]
    return dict_add_prefix(correct_metrics(correct), "rollout/")


def _pass_rate(config: MetricsConfig, samples: Sequence[Sample]) -> dict[str, float]:
    return pass_rate_of_groups(list(_rewards_by_group(samples, _rewards(config, samples)).values()))


def eval_log_metrics(
    rollout_id: int,
    config: MetricsConfig,
    data: Mapping[str, Mapping[str, Any]],
    extra_metrics: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """``eval/<dataset>`` (mean reward) and its companions for every evaluated dataset.

    ``data`` maps a dataset's name to ``{"rewards", "truncated", "samples"}``, lists in sample order.
    Empty when ``--custom-eval-rollout-log-function-path`` did the logging.
    """
    hook = config.rollout.custom_eval_rollout_log_function_path
    if hook and _logged_by(hook, rollout_id, config.flat, data, extra_metrics):
        return {}
    metrics: dict[str, Any] = dict(extra_metrics or {})
    for name, result in data.items():
        metrics |= _eval_dataset_metrics(config, name, result)
    return metrics


def _eval_dataset_metrics(config: MetricsConfig, name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    rewards = [plain_number(reward) for reward in result.get("rewards", ())]
    if not rewards or not all(isinstance(reward, Real) for reward in rewards):
        raise ValueError(
            f"eval/{name}: rewards {rewards!r:.100}, wanted a number for each sample (--eval-reward-key "
            "names one of a mapping)"
        )
    metrics: dict[str, Any] = {f"eval/{name}": statistics.fmean(rewards)}
    if samples := result.get("samples"):
        metrics |= dict_add_prefix(metrics_of_samples(config, samples, rewards), f"eval/{name}/")
    if len(truncated := result.get("truncated", ())):
        metrics[f"eval/{name}-truncated_ratio"] = statistics.fmean(map(float, truncated))
    if config.tracking.log_passrate:
        metrics |= dict_add_prefix(_eval_pass_rate(config, name, result), f"eval/{name}-")
    return metrics


def _eval_pass_rate(config: MetricsConfig, name: str, result: Mapping[str, Any]) -> dict[str, float]:
    """Computes pass rates by group.

    Without samples, or with samples that nobody grouped, by the number of answers per prompt.
    """
    rewards, samples = result["rewards"], result.get("samples") or []
    if len(samples) == len(rewards) and all(sample.group_index is not None for sample in samples):
        return pass_rate_of_groups(list(_rewards_by_group(samples, rewards).values()))
    return compute_pass_rate(rewards, _eval_group_size(config, name))


def _eval_group_size(config: MetricsConfig, name: str) -> int:
    for dataset in config.evaluation.eval_datasets:
        if dataset.name == name and dataset.n_samples_per_eval_prompt is not None:
            return dataset.n_samples_per_eval_prompt
    return config.evaluation.n_samples_per_eval_prompt


def compute_metrics_from_samples(args: Any, samples: Sequence[Sample]) -> dict[str, Any]:
    """Computes `metrics_of_samples` for plug-ins."""
    return metrics_of_samples(run_config(args), samples)


def metrics_of_samples(
    config: MetricsConfig, samples: Sequence[Sample], rewards: Sequence[Any] | None = None
) -> dict[str, Any]:
    """Lengths (in trained tokens), rewards, truncation and repetition of ``samples``, without a prefix.

    ``rewards`` are the samples' numbers if those are not what ``--reward-key`` says, as in evaluations.
    """
    lengths = [sample.effective_response_length for sample in samples]
    if rewards is None:
        rewards = _rewards(config, samples)
    several = config.lora.named_adapters
    return {
        **dict_add_prefix(compute_statistics(lengths), "response_len/"),
        **_reward_metrics(rewards),
        **_zero_std_metrics(config, samples, rewards),
        **_speculation_metrics(config, samples),
        **_prefix_cache_metrics(samples),
        **_compute_top_p_kept_vocab_metrics(samples),
        **_reward_category_metrics(config, samples),
        **_ungraded_metrics(samples),
        **_metrics_by("source", "source_name", samples, rewards),
        **(_metrics_by("adapter", config.lora.lora_adapter_key, samples, rewards) if several else {}),
        "repetition_frac": statistics.fmean(float(has_repetition(sample.response)) for sample in samples),
        "truncated_ratio": statistics.fmean(
            float(sample.status == Sample.Status.TRUNCATED) for sample in samples
        ),
    }


def _reward_metrics(rewards: Sequence[Any]) -> dict[str, float]:
    """The mean reward before normalisation; nothing for rewards that are not numbers."""
    if not all(isinstance(reward, Real) for reward in rewards):
        return {}
    return {"raw_reward": statistics.fmean(float(reward) for reward in rewards)}


def _zero_std_metrics(
    config: MetricsConfig, samples: Sequence[Sample], rewards: Sequence[Any]
) -> dict[str, float]:
    """How many groups got one and the same reward throughout, and so carry no group-relative signal.

    ``flat_groups`` is their part of the groups that have several samples; absent without such groups.
    """
    if config.advantages.advantage_estimator == "ppo":
        return {}
    groups = _rewards_by_group(samples, rewards)
    flat = [group[0] for group in groups.values() if group.count(group[0]) == len(group)]
    counts = Counter(str(round(reward, 1)) for reward in flat if isinstance(reward, Real))
    metrics: dict[str, float] = {f"zero_std/count_{reward}": count for reward, count in counts.items()}
    compared = [group for group in groups.values() if len(group) > 1]
    if compared:
        metrics["flat_groups"] = statistics.fmean(group.count(group[0]) == len(group) for group in compared)
    return metrics


def _rewards_by_group(samples: Sequence[Sample], rewards: Sequence[Any]) -> dict[int | None, list[Any]]:
    groups: dict[int | None, list[Any]] = defaultdict(list)
    for sample, reward in zip(samples, rewards, strict=False):  # a user's evaluation may score otherwise
        groups[sample.group_index].append(reward)
    return groups


def _speculation_metrics(config: MetricsConfig, samples: Sequence[Sample]) -> dict[str, float]:
    if not config.others.get("sglang_speculative_algorithm"):
        return {}
    accepted = sum(sample.spec_info.spec_accept_token_num for sample in samples)
    drafted = sum(sample.spec_info.spec_draft_token_num for sample in samples)
    verified = sum(sample.spec_info.spec_verify_ct for sample in samples)
    completed = sum(sample.spec_info.completion_token_num for sample in samples)
    return {
        "spec_accept_rate": accepted / drafted if drafted else 0.0,
        "spec_accept_length": completed / verified if verified else 0.0,
    }


def _prefix_cache_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    total = sum(sample.prefix_cache_info.total_prompt_tokens for sample in samples)
    if not total:
        return {}
    cached = sum(sample.prefix_cache_info.cached_tokens for sample in samples)
    again = sum(sample.prefix_cache_info.recomputed_tokens for sample in samples)
    return {
        "prefix_cache_hit_rate": cached / total,
        "avg_cached_tokens_per_sample": cached / len(samples),
        **({"recomputed_tokens": again} if again else {}),
    }


def _compute_top_p_kept_vocab_metrics(all_samples: Sequence[Sample]) -> dict[str, float]:
    """The mean size of the nuclei that tokens were drawn from; nothing where none was recorded."""
    sizes = [
        size
        for sample in all_samples
        if (offsets := sample.rollout_top_p_token_offsets) is not None
        for size in np.diff(offsets)
        if size
    ]
    return {"top_p_kept_vocab_per_token": statistics.fmean(sizes)} if sizes else {}


def _reward_category_metrics(config: MetricsConfig, samples: Sequence[Sample]) -> dict[str, float]:
    key = config.tracking.log_reward_category
    if not key:
        return {}
    counts = Counter(sample.reward[key] for sample in samples if isinstance(sample.reward, dict))
    return {f"error_cat/{category}": count / len(samples) for category, count in counts.items()}


def _ungraded_metrics(samples: Sequence[Sample]) -> dict[str, int]:
    """How many answers their grader failed on; nothing without any."""
    count = sum("grading_failure" in sample.metadata for sample in samples)
    return {"ungraded_count": count} if count else {}


def _metrics_by(kind: str, key: str, samples: Sequence[Sample], rewards: Sequence[Any]) -> dict[str, float]:
    """Share and mean reward of the samples with each value of ``key`` in their metadata; nothing where none
    has one.
    """
    if not any(key in sample.metadata for sample in samples):
        return {}
    found: dict[str, list[Any]] = defaultdict(list)
    for sample, reward in zip(samples, rewards, strict=False):
        found[sample.metadata.get(key, "unknown")].append(reward)
    shares = {f"{kind}/{name}/share": len(own) / len(samples) for name, own in found.items()}
    means = {f"{kind}/{name}/{key}": v for name, r in found.items() for key, v in _reward_metrics(r).items()}
    return shares | means


def _rewards(config: MetricsConfig, samples: Sequence[Sample]) -> list[Any]:
    """The number of each sample that ``--reward-key`` names; None where there is no reward."""
    values = [
        None if sample.reward is None else sample.get_reward_value(config.rewards) for sample in samples
    ]
    return [plain_number(value) for value in values]


def compute_perf_metrics_from_samples(
    args: ClusterConfig, samples: Sequence[Sample], rollout_time: float, gpus: int | None = None
) -> dict[str, float]:
    """Generation speed; ``rollout_time`` in seconds, ``gpus`` of the engines, by default those of the flags.

    Tokens that samples had before this rollout do not count. "effective" counts trained tokens only, leaving
    out tool results and masked turns.
    """
    outside = [sample.non_generation_time for sample in samples]
    metrics: dict[str, float] = {}
    if max(outside) > 0:
        metrics |= dict_add_prefix(compute_statistics(outside), "non_generation_time/")
    gpus = args.rollout_num_gpus if gpus is None else gpus
    new = [slice(sample.metadata.get(EARLIER_TOKENS, 0), sample.response_length) for sample in samples]
    lengths = [max(0, tokens.stop - tokens.start) for tokens in new]
    metrics |= _token_rates(lengths, outside, rollout_time, gpus, "")
    effective = [
        length if sample.loss_mask is None else sum(sample.loss_mask[tokens])
        for sample, tokens, length in zip(samples, new, lengths, strict=True)
    ]
    metrics |= _token_rates(effective, outside, rollout_time, gpus, "effective_")
    return metrics | request_metrics(samples)


def _token_rates(
    lengths: Sequence[int], outside: Sequence[float], rollout_time: float, gpus: int, kind: str
) -> dict[str, float]:
    """Tokens per second over the rollout; the longest sample bounds how short a rollout can get."""
    longest = max(lengths)
    rates = {f"longest_{kind}sample_tokens_per_sec": longest / rollout_time}
    if gpus:
        rates[f"{kind}tokens_per_gpu_per_sec"] = sum(lengths) / rollout_time / gpus
    waited = statistics.fmean(t for t, length in zip(outside, lengths, strict=True) if length == longest)
    if 0 < waited < rollout_time:
        rates[f"longest_{kind}sample_tokens_per_sec_without_non_generation"] = longest / (
            rollout_time - waited
        )
    return rates
