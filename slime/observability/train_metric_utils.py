"""Metrics of the trainer, reduced over its data-parallel ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist


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
