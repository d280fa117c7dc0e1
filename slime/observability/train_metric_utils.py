"""Metrics of the trainer, reduced over its data-parallel ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist


def reduce_train_step_metrics(
    losses_reduced: Sequence[Mapping[str, Any]],
    *,
    calculate_per_token_loss: bool,
    step_global_batch_size: int,
    cp_size: int = 1,
    dp_with_cp_group: dist.ProcessGroup | None,
) -> dict[str, float]:
    """Sums the micro-batches of all ranks and divides by the step's rollouts, or by its tokens.

    Args:
        losses_reduced: per micro-batch {"keys": names, "values": [1 + names]}, the first value being tokens.
        cp_size: ranks of the group that count the tokens of the same sequences, each with a piece of their
            values; 1 where a rank has whole responses.
    """
    total = torch.stack([result["values"] for result in losses_reduced]).sum(0).double()
    if dp_with_cp_group is not None:
        dist.all_reduce(total, group=dp_with_cp_group)
    divisor = float(total[0]) / cp_size if calculate_per_token_loss else float(step_global_batch_size)
    return dict(zip(losses_reduced[0]["keys"], (total[1:] / divisor).tolist(), strict=True))


def rollout_log_metric_contribution(
    per_rank_reducer_sum: float, *, cp_size: int, num_rollouts_in_rollout: int, dp_size: int
) -> tuple[float, float]:
    """What a rank adds to a metric's sum and to its count, so that sum / count over all ranks is the mean.

    Args:
        per_rank_reducer_sum: of means per rollout over the rank's own samples and piece of them.
        num_rollouts_in_rollout: of all ranks.
        dp_size: data-parallel ranks, of which each has ``cp_size`` context-parallel ones.
    """
    return cp_size * per_rank_reducer_sum, num_rollouts_in_rollout / dp_size


def gather_and_reduce_log_dict(
    log_dict: Mapping[str, Any], *, dp_size: int, dp_src_rank: int, dp_group: dist.ProcessGroup | None
) -> dict[str, float] | None:
    """The means of all ranks' metrics, on the rank ``dp_src_rank``; None on the others.

    Args:
        log_dict: numbers, of which the mean is taken, or pairs (sum, count) that are added up first.
        dp_src_rank: its global rank.
    """
    gathered: list[Mapping[str, Any]] = [log_dict]
    if dp_size > 1:
        is_source = dist.get_rank() == dp_src_rank
        received: list[Any] | None = [None] * dp_size if is_source else None
        dist.gather_object(dict(log_dict), received, dst=dp_src_rank, group=dp_group)
        if received is None:
            return None
        gathered = received
    return {name: _mean([metrics[name] for metrics in gathered]) for name in log_dict}


def _mean(values: Sequence[Any]) -> float:
    if not isinstance(values[0], tuple):
        return float(sum(values)) / len(values)
    total, count = (float(sum(parts)) for parts in zip(*values, strict=True))
    return total / count if count else 0.0


def perf_metrics(
    seconds: Mapping[str, float],
    forward_flops: float,
    tokens: int,
    world_size: int,
    peak_tflops: float | None = None,
) -> dict[str, float]:
    """``perf/<phase>_time`` in seconds, and the model's throughput per GPU in the phases that compute.

    Args:
        forward_flops: of one forward pass over the whole batch; a training pass counts three times that.
        tokens: of the whole batch.
        peak_tflops: of a GPU, against which the products of the optimizer steps are held.
    """
    metrics = {f"perf/{name}_time": value for name, value in seconds.items()}
    for phase, passes in (("log_probs", 1), ("ref_log_probs", 1), ("actor_train", 3)):
        if seconds.get(phase):
            rate = passes * forward_flops / seconds[phase] / world_size
            metrics[f"perf/{phase}_tflops"] = rate / 1e12
    if seconds.get("actor_train"):
        metrics["perf/actor_train_tok_per_s"] = tokens / seconds["actor_train"]
        if peak_tflops:
            metrics["perf/actor_train_mfu"] = metrics["perf/actor_train_tflops"] / peak_tflops
    return metrics
