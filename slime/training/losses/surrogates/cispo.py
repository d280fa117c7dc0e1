"""CISPO's surrogate: REINFORCE, weighted with the clipped ratio."""

import torch

from slime.config.loss import LossConfig
from slime.training.kl import ratio_of
from slime.training.losses.surrogates.tokens import PolicyTokens, Surrogate


def weighted_surrogate(config: LossConfig, tokens: PolicyTokens) -> Surrogate:
    """`compute_cispo_loss` with the bounds of the run."""
    new, advantages = torch.cat(list(tokens.new)), torch.cat(list(tokens.advantages))
    log_ratio = torch.cat(list(tokens.old)) - new
    loss, share = compute_cispo_loss(log_ratio, new, advantages, config.eps_clip, config.eps_clip_high)
    return Surrogate(loss, log_ratio, share)


def compute_cispo_loss(
    ppo_kl: torch.Tensor,
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """CISPO per token (arXiv 2506.13585, eq. 4): the clipped ratio weights REINFORCE, without a gradient.

    Returns:
        The loss, and 1.0 where the ratio was clipped.
    """
    ratio = ratio_of(-ppo_kl)
    clipped = ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    return -clipped.detach() * advantages * log_probs, (clipped != ratio).float()
