"""PPO's clipped surrogate."""

import torch

from slime.config.loss import LossConfig
from slime.training.kl import ratio_of
from slime.training.losses.surrogates.tokens import PolicyTokens, Surrogate


def clipped_surrogate(config: LossConfig, tokens: PolicyTokens) -> Surrogate:
    """`compute_policy_loss` of each token's own ratio."""
    return clipped(config, tokens, torch.cat(list(tokens.old)) - torch.cat(list(tokens.new)))


def clipped(config: LossConfig, tokens: PolicyTokens, log_ratio: torch.Tensor) -> Surrogate:
    """`compute_policy_loss` with the bounds of the run, of ratios e^-log_ratio."""
    advantages = torch.cat(list(tokens.advantages))
    loss, share = compute_policy_loss(
        log_ratio, advantages, config.eps_clip, config.eps_clip_high, config.eps_clip_c
    )
    return Surrogate(loss, log_ratio, share)


def compute_policy_loss(
    ppo_kl: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped surrogate per token (arXiv 1707.06347, eq. 7), with dual clip (arXiv 1912.09729).

    Args:
        ppo_kl: old minus new log-probs; the ratio is e^-ppo_kl.
        eps_clip_c: for negative advantages the loss does not exceed ``-eps_clip_c * advantage``.

    Returns:
        The loss, and 1.0 where clipping changed it.

    Raises:
        ValueError: ``eps_clip_c`` is not above 1.
    """
    ratio = ratio_of(-ppo_kl)
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    loss = torch.maximum(unclipped, clipped)
    clip_fraction = (clipped > unclipped).float()
    if eps_clip_c is not None:
        if eps_clip_c <= 1:
            raise ValueError(f"--eps-clip-c {eps_clip_c}: wanted a value above 1")
        loss = torch.where(advantages < 0, torch.minimum(-eps_clip_c * advantages, loss), loss)
    return loss, clip_fraction
