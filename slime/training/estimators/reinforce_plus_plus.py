"""REINFORCE++ (arXiv 2501.03262) and its form with the group's mean as baseline."""

from collections.abc import Sequence
from typing import Any

import torch

from slime.config.estimation import EstimationConfig
from slime.utils.types import RolloutBatch


def token_returns(config: EstimationConfig, shard: RolloutBatch) -> list[torch.Tensor]:
    """Discounted returns of the KL penalties and of the reward at the last trained token."""
    kl_coef, gamma = config.kl.kl_coef, config.advantages.gamma
    return get_reinforce_plus_plus_returns(
        shard["rewards"], shard["kl"], shard["loss_masks"], None, None, kl_coef, gamma
    )


def baseline_returns(config: EstimationConfig, shard: RolloutBatch) -> list[torch.Tensor]:
    """The centred reward less the KL penalty of each token."""
    return get_reinforce_plus_plus_baseline_advantages(shard["rewards"], shard["kl"], None, config.kl.kl_coef)


def get_reinforce_plus_plus_returns(
    rewards: Sequence[float] | torch.Tensor,
    kl: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    response_lengths: Any,
    total_lengths: Any,
    kl_coef: float,
    gamma: float,
) -> list[torch.Tensor]:
    """`reinforce_plus_plus_returns` of each sample. The lengths are not needed: responses come whole."""
    samples = zip(rewards, kl, loss_masks, strict=True)
    return [
        reinforce_plus_plus_returns(float(reward), penalty, mask, kl_coef, gamma)
        for reward, penalty, mask in samples
    ]


def get_reinforce_plus_plus_baseline_advantages(
    rewards: Sequence[float] | torch.Tensor,
    kl: Sequence[torch.Tensor],
    loss_masks: Any,
    kl_coef: float,
) -> list[torch.Tensor]:
    """A_t = r - kl_coef * kl_t, the reward r being centred on its group; masks change nothing."""
    return [float(reward) - kl_coef * penalty for reward, penalty in zip(rewards, kl, strict=True)]


def reinforce_plus_plus_returns(
    reward: float, kl: torch.Tensor, mask: torch.Tensor, kl_coef: float, gamma: float
) -> torch.Tensor:
    """Returns of -kl_coef * kl per token plus the reward at the last trained one; kl, mask: [R].

    Without a trained token there is none that the reward could go to: all zeros.
    """
    rewards = torch.where(mask != 0, -kl_coef * kl, 0.0)
    trained = mask.nonzero()
    if trained.numel():
        rewards[trained[-1]] += reward
    return discounted_returns(rewards, gamma)


def discounted_returns(rewards: torch.Tensor, gamma: float) -> torch.Tensor:
    """G_t = r_t + gamma * G_(t+1); rewards: [R]."""
    if gamma == 1.0:
        return rewards.flip(0).cumsum(0).flip(0)
    returns = torch.empty_like(rewards)
    running = rewards.new_zeros(())
    for t in range(rewards.numel() - 1, -1, -1):
        running = rewards[t] + gamma * running
        returns[t] = running
    return returns
