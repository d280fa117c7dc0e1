"""``--save-debug-train-data``: what was trained on."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slime.arguments.views import TrainingView
from slime.training.parallel import ParallelContext
from slime.utils.types import RolloutBatch


def dump_batch(args: TrainingView, rollout_id: int, batch: RolloutBatch, context: ParallelContext) -> None:
    """Writes the shards of all data-parallel ranks into one file, if the flag asks for it."""
    template = args.save_debug_train_data
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
