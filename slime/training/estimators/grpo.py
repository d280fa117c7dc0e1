"""GRPO and its kin: the normalised reward of a sample, at each of its tokens."""

import torch

from slime.arguments.views import TrainingView
from slime.utils.types import RolloutBatch


def group_relative_returns(args: TrainingView, shard: RolloutBatch) -> list[torch.Tensor]:
    """A_t = (r - mean of the group) / its deviation (arXiv 2402.03300, sec. 4.1.2), the same for all t."""
    return [torch.full_like(kl, reward) for reward, kl in zip(shard["rewards"], shard["kl"], strict=True)]
