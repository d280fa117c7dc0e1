"""``--save-debug-train-data``: what was trained on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slime.config.debug import DebugConfig
from slime.training.parallel import ParallelContext
from slime.utils.types import RolloutBatch


def dump_batch(config: DebugConfig, rollout_id: int, batch: RolloutBatch, context: ParallelContext) -> None:
    """Writes the shards of all data-parallel ranks into one file, if the flag asks for it."""
    template = config.save_debug_train_data
    if not template or not context.is_last_stage or context.tp_rank or context.cp_rank:
        return
    shard = {key: to_host(value) for key, value in batch.items()}
    shards: list[Any] = [None] * context.dp_size
    dist.all_gather_object(shards, shard, group=context.dp_group)
    if context.is_main:
        path = Path(template.format(rollout_id=rollout_id))
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"rollout_id": rollout_id, "shards": shards}, path)


def to_host(value: Any) -> Any:
    """Tensors and arrays of numbers, also those in lists, as tensors in host memory; anything else as it is.

    ``torch.load(weights_only=True)`` reads no arrays.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.tensor(value)
    return [to_host(item) for item in value] if isinstance(value, list) else value


def save_debug_train_data(args: DebugConfig, *, rollout_id: int, rollout_data: RolloutBatch) -> None:
    """`dump_batch` on the rank that calls, for plug-ins."""
    dump_batch(args, rollout_id, rollout_data, ParallelContext.current())


_SPLIT = (
    *("rollout_log_probs", "teacher_log_probs", "log_probs", "ref_log_probs", "entropy", "values"),
    *("kl", "advantages", "returns", "opd_reverse_kl"),
)


def restore_context_parallel_fields_to_cpu(
    rollout_data: RolloutBatch,
    gather_tensor: Callable[[torch.Tensor, int, int], torch.Tensor],
    *,
    keep_restored: bool,
) -> dict[str, list[torch.Tensor]]:
    """The values per token of whole responses, in host memory; empty unless ``keep_restored``.

    All ranks of a group call it alike, since gathering is done together.

    Args:
        gather_tensor: fn(a rank's piece, total_length, response_length), such as ``all_gather_with_cp``.
    """
    restored: dict[str, list[torch.Tensor]] = {}
    lengths = list(zip(rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True))
    for name in _SPLIT:
        if rollout_data.get(name) is None:
            continue
        whole = [
            gather_tensor(values, *length) for values, length in zip(rollout_data[name], lengths, strict=True)
        ]
        if keep_restored:
            restored[name] = [values.detach().cpu() for values in whole]
    return restored
