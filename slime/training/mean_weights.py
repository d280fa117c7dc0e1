"""The mean importance weight of each optimizer step, by which ``--tis-batch-normalize`` divides."""

from collections.abc import Iterator
from itertools import islice

import torch
import torch.distributed as dist

from slime.config.off_policy import OffPolicyConfig
from slime.training.losses.mis import bounded, mean_of, weight_of, weight_sums
from slime.training.parallel import ParallelContext
from slime.utils.types import RolloutBatch


def add_mean_weights(config: OffPolicyConfig, batch: RolloutBatch, context: ParallelContext) -> None:
    """Adds ``mean_weight``: per sample the mean over the trained tokens (or sequences) of its optimizer step.

    Over the whole step and all ranks, so that the loss does not hang on how a step is cut into micro-batches.

    Raises:
        ValueError: the batch has no log-probs of the engine.
    """
    if "rollout_log_probs" not in batch:
        raise ValueError("--tis-batch-normalize: the rollout has no log-probs of the engine")
    weights = []
    samples = zip(batch["log_probs"], batch["rollout_log_probs"], batch["loss_masks"], strict=True)
    for train, rollout, mask in samples:
        weight = weight_of(train - rollout, mask, config.tis_level)
        weights.append(bounded(weight, config.tis_mode, config.tis_lower_bound, config.tis_upper_bound))
    steps = list(_steps(batch))
    sums = torch.tensor(
        [
            weight_sums([weights[i] for i in step], [batch["loss_masks"][i] for i in step], config.tis_level)
            for step in steps
        ],
        dtype=torch.float64,
        device=batch["tokens"][0].device,
    )
    if context.dp_group is not None:
        dist.all_reduce(sums, group=context.dp_group)
    means: dict[int, float] = {}
    for step, (total, count) in zip(steps, sums.tolist(), strict=True):
        means |= dict.fromkeys(step, mean_of(total, count))
    batch["mean_weight"] = [means[i] for i in range(len(weights))]


def _steps(batch: RolloutBatch) -> Iterator[list[int]]:
    """The positions in this rank's shard of each optimizer step's samples."""
    micro_batches = iter(batch["micro_batch_indices"])
    for count in batch["num_microbatches"]:
        yield [position for part in islice(micro_batches, count) for position in part]
