"""Metrics of the trainer, reduced over its data-parallel ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

# Averaged like a loss: per token within a rollout, then over rollouts.
_TOKEN_KEYS = ("log_probs", "ref_log_probs", "rollout_log_probs", "returns", "advantages", "kl", "entropy")
# Averaged over samples.
_SAMPLE_KEYS = ("rewards", "raw_reward", "response_lengths", "total_lengths", "truncated")


def reduce_train_step_metrics(
    results: Sequence[Mapping[str, Any]],
    step_global_batch_size: int,
    group: dist.ProcessGroup | None,
    per_token: bool,
) -> dict[str, float]:
    """Sums the micro-batches of all ranks and divides by the step's rollouts, or by its tokens.

    Args:
        results: per micro-batch {"keys": names, "values": [1 + names]}, the first value being tokens.
    """
    total = torch.stack([result["values"] for result in results]).sum(0).double()
    if group is not None:
        dist.all_reduce(total, group=group)
    divisor = float(total[0]) if per_token else float(step_global_batch_size)
    return dict(zip(results[0]["keys"], (total[1:] / divisor).tolist(), strict=True))


def rollout_metrics(
    rollout_data: Mapping[str, Any], num_rollouts: int, group: dist.ProcessGroup | None
) -> dict[str, float]:
    """``rollout/<key>`` of a rollout as the trainer saw it, over all ranks.

    Per-token values are averaged within each rollout by its mask and then over rollouts, the rest over
    samples.

    Args:
        rollout_data: this rank's shard after the advantages; ``loss_masks`` and ``rollout_mask_sums``
            weight the tokens.
        num_rollouts: rollouts of the whole batch.
    """
    sums: dict[str, float] = {}
    for key in _TOKEN_KEYS:
        if key in rollout_data:
            sums[key] = _masked_sum(rollout_data, key)
    for key in _SAMPLE_KEYS:
        values = rollout_data.get(key)
        # Raw rewards may be anything. The shard keeps those of the whole batch beside its own, and only
        # they tell: ranks that judged their own would reduce different numbers of sums.
        if values is not None and all(isinstance(value, int | float) for value in values):
            sums[key] = float(sum(rollout_data["local_raw_reward"] if key == "raw_reward" else values))
    totals = torch.tensor([float(len(rollout_data["tokens"])), *sums.values()], dtype=torch.float64)
    if group is not None:
        device = rollout_data["tokens"][0].device
        totals = totals.to(device)
        dist.all_reduce(totals, group=group)
    samples, *reduced = totals.tolist()
    return {
        f"rollout/{key}": value / (num_rollouts if key in _TOKEN_KEYS else samples)
        for key, value in zip(sums, reduced, strict=True)
    }


def _masked_sum(rollout_data: Mapping[str, Any], key: str) -> float:
    """Sum over this rank's samples of (masked sum / mask total of the sample's rollout)."""
    total = 0.0
    samples = zip(
        rollout_data[key], rollout_data["loss_masks"], rollout_data["rollout_mask_sums"], strict=True
    )
    for values, mask, denominator in samples:
        total += float((values * mask).sum()) / max(float(denominator), 1.0)
    return total


def perf_metrics(
    seconds: Mapping[str, float], forward_flops: float, tokens: int, world_size: int
) -> dict[str, float]:
    """``perf/<phase>_time`` in seconds, and the model's throughput per GPU in the phases that compute.

    Args:
        forward_flops: of one forward pass over the whole batch; a training pass counts three times that.
        tokens: of the whole batch.
    """
    metrics = {f"perf/{name}_time": value for name, value in seconds.items()}
    for phase, passes in (("log_probs", 1), ("ref_log_probs", 1), ("actor_train", 3)):
        if seconds.get(phase):
            rate = passes * forward_flops / seconds[phase] / world_size
            metrics[f"perf/{phase}_tflops"] = rate / 1e12
    if seconds.get("actor_train"):
        metrics["perf/actor_train_tok_per_s"] = tokens / seconds["actor_train"]
    return metrics
