"""GRPO and its kin: the normalised reward of a sample, at each of its tokens."""

from collections.abc import Sequence

import torch

from slime.config.estimation import EstimationConfig
from slime.utils.types import RolloutBatch


def group_relative_returns(config: EstimationConfig, shard: RolloutBatch) -> list[torch.Tensor]:
    """A_t = (r - mean of the group) / its deviation (arXiv 2402.03300, sec. 4.1.2), the same for all t.

    What of that is done, and the mean of whom, ``post_process_rewards`` has decided: RLOO, for instance,
    leaves out a sample's own reward and the division.
    """
    return get_grpo_returns(shard["rewards"], shard["kl"])


def get_grpo_returns(
    rewards: Sequence[float] | torch.Tensor, kl: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Each sample's reward at each of its tokens; ``kl`` gives the shapes [R]."""
    return [torch.full_like(like, float(reward)) for reward, like in zip(rewards, kl, strict=True)]
