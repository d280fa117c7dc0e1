"""PPO with a critic: generalised advantage estimation (arXiv 1506.02438) over the tokens of a response."""

import torch

from slime.config.estimation import EstimationConfig
from slime.training.estimators.gae import get_advantages_and_returns_batch
from slime.training.estimators.result import Estimates
from slime.utils.types import RolloutBatch


def gae(config: EstimationConfig, shard: RolloutBatch) -> Estimates:
    """Advantages and returns from the critic's ``values``, the KL penalties and the rewards.

    The steps of the decision process are the trained tokens: what the loss mask leaves out, as a tool's
    answer, was no decision, and the critic never learns its value. It gets advantages and returns of 0. The
    last trained token has the reward.
    """
    masks = [mask != 0 for mask in shard["loss_masks"]]
    samples = zip(shard["rewards"], shard["kl"], masks, strict=True)
    rewards = [token_rewards(reward, kl[mask], config.kl.kl_coef) for reward, kl, mask in samples]
    values = [value[mask] for value, mask in zip(shard["values"], masks, strict=True)]
    lengths = [len(value) for value in values]
    advantages, returns = get_advantages_and_returns_batch(
        shard["total_lengths"], lengths, values, rewards, config.advantages.gamma, config.advantages.lambd
    )
    return Estimates(_spread(advantages, masks), _spread(returns, masks))


def token_rewards(reward: float, kl: torch.Tensor, kl_coef: float) -> torch.Tensor:
    """-kl_coef * kl of each token, plus the reward of the response at its last one; kl: [R]."""
    rewards = -kl_coef * kl
    rewards[-1:] += reward
    return rewards


def _spread(trained: list[torch.Tensor], masks: list[torch.Tensor]) -> list[torch.Tensor]:
    """Per sample [R]: the values of its trained tokens at their places, 0 at the others."""
    results = []
    for values, mask in zip(trained, masks, strict=True):
        whole = values.new_zeros(len(mask))
        whole[mask] = values
        results.append(whole)
    return results
