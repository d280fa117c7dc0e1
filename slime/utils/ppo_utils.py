"""Formulas of policy optimisation, as functions of tensors.

Log-probs are natural logarithms, float32, of response tokens; ``mask`` is 1 where a token counts.
"""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch

KL_TYPES = ("k1", "k2", "k3", "low_var_kl")
# The clamp of low_var_kl, which keeps one outlier token from dominating a batch.
_LOW_VAR_BOUND = 10.0


def compute_approx_kl(
    log_probs: torch.Tensor,
    log_probs_base: torch.Tensor,
    kl_loss_type: str,
    importance_ratio: torch.Tensor | None = None,
) -> torch.Tensor:
    """Per-token estimate of KL(policy || base) (Schulman, "Approximating KL Divergence", 2020).

    With r = log_probs - log_probs_base: k1 is r, k2 is r^2 / 2, k3 and low_var_kl are e^-r - 1 + r;
    low_var_kl is clamped to [-10, 10]. ``importance_ratio`` multiplies the estimate.

    Raises:
        ValueError: unknown ``kl_loss_type``.
    """
    ratio = log_probs.float() - log_probs_base.float()
    if kl_loss_type == "k1":
        kl = ratio
    elif kl_loss_type == "k2":
        kl = ratio.square() / 2
    elif kl_loss_type in ("k3", "low_var_kl"):
        kl = torch.exp(-ratio) - 1 + ratio
    else:
        raise ValueError(f"--kl-loss-type {kl_loss_type}: wanted one of {', '.join(KL_TYPES)}")
    if importance_ratio is not None:
        kl = importance_ratio * kl
    return kl.clamp(-_LOW_VAR_BOUND, _LOW_VAR_BOUND) if kl_loss_type == "low_var_kl" else kl


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
    ratio = torch.exp(-ppo_kl)
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    loss = torch.maximum(unclipped, clipped)
    clip_fraction = (clipped > unclipped).float()
    if eps_clip_c is not None:
        if eps_clip_c <= 1:
            raise ValueError(f"--eps-clip-c {eps_clip_c}: wanted a value above 1")
        loss = torch.where(advantages < 0, torch.minimum(-eps_clip_c * advantages, loss), loss)
    return loss, clip_fraction


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
    ratio = torch.exp(-ppo_kl)
    clipped = ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    return -clipped.detach() * advantages * log_probs, (clipped != ratio).float()


def sequence_kl(old_log_probs: torch.Tensor, log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of old minus new log-probs over the unmasked tokens of one sequence: a scalar."""
    mask = mask.float()
    return ((old_log_probs - log_probs) * mask).sum() / mask.sum().clamp(min=1)


def compute_gspo_kl(
    old_log_probs: Sequence[torch.Tensor],
    log_probs: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
) -> torch.Tensor:
    """GSPO's negated log-ratio (arXiv 2507.18071, eq. 7): each sequence's `sequence_kl` at all its tokens."""
    return torch.cat(
        [
            sequence_kl(old, new, mask).expand_as(new)
            for old, new, mask in zip(old_log_probs, log_probs, masks, strict=True)
        ]
    )


def compute_opsm_mask(
    old_log_probs: Sequence[torch.Tensor],
    log_probs: Sequence[torch.Tensor],
    advantages: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    delta: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Off-policy sequence masking: drops sequences with A < 0 that drifted beyond ``delta``.

    Returns:
        The factor per token (concatenated, 0.0 or 1.0), and the dropped share summed over sequences.
    """
    factors, dropped = [], torch.zeros((), device=log_probs[0].device)
    for old, new, advantage, mask in zip(old_log_probs, log_probs, advantages, masks, strict=True):
        drop = ((advantage < 0) & (sequence_kl(old, new.detach(), mask) > delta)).float()
        dropped += (drop * mask).sum() / mask.sum().clamp(min=1)
        factors.append(1 - drop)
    return torch.cat(factors), dropped


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


def reinforce_plus_plus_returns(
    reward: float, kl: torch.Tensor, mask: torch.Tensor, kl_coef: float, gamma: float
) -> torch.Tensor:
    """REINFORCE++ (arXiv 2501.03262): returns of -kl_coef * kl per token plus the reward at the last one.

    Raises:
        ValueError: the mask is zero everywhere, so the reward has no token to go to.
    """
    trained = mask.nonzero()
    if trained.numel() == 0:
        raise ValueError(
            "reinforce_plus_plus: a sample's loss mask is zero, wanted at least one trained token"
        )
    rewards = -kl_coef * kl * mask
    rewards[trained[-1]] += reward
    return discounted_returns(rewards, gamma)


def vanilla_tis_function(
    args: Namespace,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: list[torch.Tensor],
    **_: Any,
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """Truncated importance sampling between engine and trainer: the weight is clamped to its bounds.

    Returns:
        The weighted loss, the loss masks, metrics per token.
    """
    weight = _engine_weight(train_log_probs, rollout_log_probs)
    clipped = weight.clamp(args.tis_clip_low, args.tis_clip)
    return pg_loss * clipped, loss_masks, _tis_metrics(weight, clipped)


def icepop_function(
    args: Namespace,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: list[torch.Tensor],
    **_: Any,
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """IcePop: as `vanilla_tis_function`, but tokens whose weight is out of bounds are dropped."""
    weight = _engine_weight(train_log_probs, rollout_log_probs)
    inside = (weight >= args.tis_clip_low) & (weight <= args.tis_clip)
    kept = torch.where(inside, weight, 0.0)
    return pg_loss * kept, loss_masks, _tis_metrics(weight, kept)


def _engine_weight(train: Sequence[torch.Tensor], rollout: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.exp(torch.cat(list(train)) - torch.cat(list(rollout))).detach()


def _tis_metrics(weight: torch.Tensor, used: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"tis": weight, "tis_clipfrac": (used != weight).float(), "tis_abs": (weight - 1).abs()}
