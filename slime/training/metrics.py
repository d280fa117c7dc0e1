"""``rollout/...`` as the trainer saw the batch."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from slime.training.batch import FIELDS, SCHEDULE, Average, Axis, is_per_sample


def rollout_metrics(
    rollout_data: Mapping[str, Any], num_rollouts: int, group: dist.ProcessGroup | None
) -> dict[str, float]:
    """``rollout/<field>`` over all ranks, for the fields that the table gives an average and for its own
    numbers.

    A key without a row of the table is averaged over samples, if it holds a number for each.

    Args:
        rollout_data: this rank's shard after the advantages; ``loss_masks`` and ``rollout_mask_sums``
            weight the tokens.
        num_rollouts: rollouts of the whole batch.
    """
    sums = dict(_sums(rollout_data))
    totals = torch.tensor([float(len(rollout_data["tokens"])), *sums.values()], dtype=torch.float64)
    if group is not None:
        device = rollout_data["tokens"][0].device
        totals = totals.to(device)
        dist.all_reduce(totals, group=group)
    samples, *reduced = totals.tolist()
    return {
        f"rollout/{key}": value / (num_rollouts if _is_per_token(key) else samples)
        for key, value in zip(sums, reduced, strict=True)
        if not (math.isnan(value) and (key == "rewards" or key not in FIELDS))
    }


def _is_per_token(key: str) -> bool:
    return key in FIELDS and FIELDS[key].average is Average.BY_ROLLOUT


def _sums(rollout_data: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """This rank's sums, the same ones on every rank."""
    for key, field in FIELDS.items():
        if key in rollout_data and field.average is Average.BY_ROLLOUT:
            yield key, _masked_sum(rollout_data, key)
        elif key in rollout_data and field.average is Average.BY_SAMPLE:
            values = rollout_data[key]
            yield key, _sum([*map(len, values)] if field.axis is Axis.RAGGED else values)
    count = len(rollout_data["tokens"])
    for key in sorted(rollout_data.keys() - FIELDS.keys() - SCHEDULE):
        values = rollout_data[key]  # of a conversion of the user's; ranks must agree which keys there are
        if is_per_sample(values):
            yield key, _sum(values) if len(values) == count else math.nan


def _sum(values: Any) -> float:
    """NaN, which all ranks get, where not every value is a number: rewards for advantages of one's own."""
    try:
        return float(sum(values))
    except (TypeError, ValueError, RuntimeError):
        return math.nan


def _masked_sum(rollout_data: Mapping[str, Any], key: str) -> float:
    """Sum over this rank's samples of (masked sum / mask total of the sample's rollout)."""
    total = 0.0
    samples = zip(
        rollout_data[key], rollout_data["loss_masks"], rollout_data["rollout_mask_sums"], strict=True
    )
    for values, mask, denominator in samples:
        total += float(torch.where(mask != 0, values, 0.0).sum()) / max(float(denominator), 1.0)
    return total
