"""Filters that leave out groups from which nothing can be learnt (DAPO, arXiv 2503.14476, eq. 11)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from slime.config.rewards import RewardConfig
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.types import Sample


def check_reward_nonzero_std(args: RewardConfig, samples: list[Any], **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group whose rewards differ: equal rewards give zero advantages."""
    rewards = np.array([sample.get_reward_value(args) for sample in _flat(samples)], dtype=np.float64)
    keep = bool(rewards.std() > 1e-6)
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"zero_std_{round(float(rewards[0]), 1)}")


def check_reward_nonzero_std_with_fallback(
    args: RewardConfig, samples: list[Any], **kwargs: Any
) -> DynamicFilterOutput:
    """Checks the spread of rewards, but rather takes a group of equal rewards than one more round of
    generation.
    """
    return replace(check_reward_nonzero_std(args, samples, **kwargs), keep_when_insufficient=True)


def _flat(samples: list[Any]) -> Iterator[Sample]:
    for sample in samples:
        if isinstance(sample, list):
            yield from sample
        else:
            yield sample
