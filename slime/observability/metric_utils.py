"""Statistics that several metrics share. Pure functions of plain numbers."""

import math
import statistics
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from slime.config.batches import BatchConfig
from slime.config.metrics import MetricsConfig
from slime.config.tracking import TrackingConfig

REPETITION_WINDOW = 10_000
REPETITION_RATIO = 10.0


def dict_add_prefix(metrics: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {prefix + name: value for name, value in metrics.items()}


def compute_statistics(values: Sequence[float]) -> dict[str, float]:
    """Mean, median, max and min.

    Raises:
        statistics.StatisticsError: ``values`` is empty.
    """
    return {
        "mean": statistics.fmean(values),
        "median": float(statistics.median(values)),
        "max": float(max(values)),
        "min": float(min(values)),
    }


def compute_pass_rate(
    flat_rewards: Sequence[float], group_size: int, num_groups: int | None = None
) -> dict[str, float]:
    """`pass_rate_of_groups` for groups of one size, which ``flat_rewards`` holds one after the other.

    Raises:
        ValueError: the rewards do not fill whole groups.
    """
    if group_size == 1:
        return {}
    groups = len(flat_rewards) // group_size if num_groups is None else num_groups
    if groups == 0 or groups * group_size != len(flat_rewards):
        raise ValueError(f"{len(flat_rewards)} rewards do not fill {groups} groups of {group_size}")
    starts = range(0, len(flat_rewards), group_size)
    return pass_rate_of_groups([flat_rewards[start : start + group_size] for start in starts])


def pass_rate_of_groups(groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """``pass@k`` for k = 1, 2, 4, ... up to the smallest group; empty where that has a single sample.

    A sample counts as correct when its reward is 1. Per group the unbiased estimator of Chen et al. 2021
    (arXiv:2107.03374, eq. 1) is used.
    """
    smallest = min(map(len, groups))
    if smallest == 1:
        return {}
    correct = [(len(group), sum(reward == 1 for reward in group)) for group in groups]
    exponents = range(int(math.log2(smallest)) + 1)
    return {
        f"pass@{2**e}": statistics.fmean(_pass_at_k(size, right, 2**e) for size, right in correct)
        for e in exponents
    }


def _pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that k of ``num_samples`` drawn without replacement include a correct one."""
    wrong = num_samples - num_correct
    return 1.0 - math.comb(wrong, k) / math.comb(num_samples, k)


def compression_ratio(text: str) -> float:
    """How many times smaller zlib makes the text; large for repetitive text, 0 for none."""
    data = text.encode()
    return len(data) / len(zlib.compress(data, level=9)) if data else 0.0


def has_repetition(text: str) -> bool:
    """Whether the end of a long text repeats itself."""
    return len(text) > REPETITION_WINDOW and compression_ratio(text[-REPETITION_WINDOW:]) > REPETITION_RATIO


def plotted_step(config: MetricsConfig, axis: str, step: int) -> int:
    """Returns where a row of an axis stands in wandb and tensorboard, by ``--wandb-always-use-train-
    step``.
    """
    return step if axis == "train" else _rollout_step(config.tracking, config.batches, step)


def compute_rollout_step(args: Any, rollout_id: int) -> int:
    """The step under which a rollout's metrics are plotted: its id, or the optimizer step it starts at."""
    return _rollout_step(args, args, rollout_id)


def _rollout_step(tracking: TrackingConfig, batches: BatchConfig, rollout_id: int) -> int:
    if not tracking.wandb_always_use_train_step:
        return rollout_id
    return rollout_id * batches.rollout_batch_size * batches.n_samples_per_prompt // batches.global_batch_size
