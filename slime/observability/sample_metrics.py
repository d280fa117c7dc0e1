"""Groups of metrics that only some runs have: turns, correct samples, what engines measured."""

import statistics
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from slime.config.rollout import RolloutConfig
from slime.observability.metric_utils import compute_statistics, dict_add_prefix
from slime.utils.types import Sample

_PERCENTILES = (25, 50, 75, 100)
# Names of metrics, and of what `slime.agent.trajectory` says in a sample's metadata.
_AGENT_COUNTS = {
    "turns": "round_number",
    "realigned_tokens": "realigned_tokens",
    "duplicated_prefix_tokens": "duplicated_prefix_tokens",
    "tool_errors": "tool_errors",
}


def multi_turn_metrics(config: RolloutConfig, samples: Sequence[Sample]) -> dict[str, float]:
    """Lengths of responses, whole and without what tools or users said in them, and the number of turns.

    Names and meanings are the original's. Turns are ``metadata["round_number"]``, which multi-turn generate
    functions set; without it in every sample there is no such metric.
    """
    whole = [sample.response_length for sample in samples]
    trained = [sample.effective_response_length for sample in samples]
    longest = config.rollout_max_response_len
    metrics = {
        **_mean_max_min(whole, "raw_response_length/response_length"),
        **_mean_max_min(trained, "wo_obs_response_length/response_length"),
    }
    if longest is not None:
        clipped = statistics.fmean(float(length >= longest) for length in whole)
        metrics["raw_response_length/response_length_clip_ratio"] = clipped
    turns = [sample.metadata.get("round_number") for sample in samples]
    counted = [turn for turn in turns if isinstance(turn, int | float)]
    if len(counted) == len(turns):
        metrics |= _mean_max_min(counted, "multi_turn_metric/round_number")
    return metrics


def _mean_max_min(values: Sequence[float], name: str) -> dict[str, float]:
    return {
        f"{name}_mean": statistics.fmean(values),
        f"{name}_max": float(max(values)),
        f"{name}_min": float(min(values)),
    }


def correct_metrics(correct: Sequence[Sample]) -> dict[str, float]:
    """Percentiles of the trained tokens of correct samples, and their entropy in nats per token.

    The entropy is estimated by the tokens that were sampled: the mean of minus the engine's log-prob. Empty
    where no sample is correct.
    """
    if not correct:
        return {}
    lengths = [sample.effective_response_length for sample in correct]
    metrics = {f"correct_length/p{p}": float(np.percentile(lengths, p)) for p in _PERCENTILES}
    surprise = [value for sample in correct for value in _surprise(sample)]
    if surprise:
        metrics["correct_entropy"] = statistics.fmean(surprise)
    return metrics


def _surprise(sample: Sample) -> list[float]:
    """Minus the log-prob of each trained token; none where it was not recorded."""
    log_probs = sample.rollout_log_probs
    if log_probs is None:
        return []
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * len(log_probs)
    return [-value for value, trained in zip(log_probs, mask, strict=True) if trained]


def agent_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """What agents did in an execution, which is one sample or several; nothing where none has turns.

    A count that only some samples have is 0 in the others.
    """
    agents = [sample for sample in samples if "round_number" in sample.metadata]
    executions = {(s.group_index, s.index if s.rollout_id is None else s.rollout_id) for s in agents}
    if not agents:
        return {}
    counted = {
        name: sum(sample.metadata.get(key, 0) for sample in agents) for name, key in _AGENT_COUNTS.items()
    }
    return {name: count / len(executions) for name, count in {"chains": len(agents), **counted}.items()}


def request_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Statistics over engine requests: ``request/e2e_latency/mean`` and so on, in seconds.

    ``decode/throughput`` is in tokens per second. What belongs to prefill and to decoding has their prefixes.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, measured in sample.request_times.items():
            values[_metric_name(name)] += measured
    metrics: dict[str, float] = {}
    for name, measured in values.items():
        metrics |= dict_add_prefix(compute_statistics(measured), f"{name}/")
    return metrics


def _metric_name(name: str) -> str:
    """``prefill/launch_latency`` of ``prefill_launch_latency``, ``request/queue_time`` of ``queue_time``."""
    name = name.removeprefix("pd_")
    for phase in ("prefill", "decode"):
        if name.startswith(f"{phase}_"):
            return f"{phase}/{name.removeprefix(f'{phase}_')}"
    return f"request/{name}"
