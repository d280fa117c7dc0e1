"""What two policies' log-probs of sampled tokens say about each other: ratios, and estimates of the KL."""

import torch

KL_TYPES = ("k1", "k2", "k3", "low_var_kl")
# The clamp of low_var_kl, which keeps one outlier token from dominating a batch.
_LOW_VAR_BOUND = 10.0
MAX_LOG_RATIO = 20.0
"""Ratios saturate at e^20, about 5e8: past it they say no more, and soon overflow."""


def ratio_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """e^log_ratio, without growth and without a gradient where the exponent is above 20."""
    return torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))


def compute_approx_kl(
    log_probs: torch.Tensor,
    log_probs_base: torch.Tensor,
    kl_loss_type: str,
    importance_ratio: torch.Tensor | None = None,
) -> torch.Tensor:
    """Per-token estimate of KL(policy || base) (Schulman, "Approximating KL Divergence", 2020).

    With r = log_probs - log_probs_base: k1 is r, k2 is r^2 / 2, k3 and low_var_kl are e^-r - 1 + r, as if r
    were -20 below that; low_var_kl is clamped to [-10, 10]. ``importance_ratio`` multiplies the estimate.

    Raises:
        ValueError: unknown ``kl_loss_type``.
    """
    ratio = log_probs.float() - log_probs_base.float()
    if kl_loss_type == "k1":
        kl = ratio
    elif kl_loss_type == "k2":
        kl = ratio.square() / 2
    elif kl_loss_type in ("k3", "low_var_kl"):
        ratio = ratio.clamp(min=-MAX_LOG_RATIO)
        kl = torch.exp(-ratio) - 1 + ratio
    else:
        raise ValueError(f"--kl-loss-type {kl_loss_type}: wanted one of {', '.join(KL_TYPES)}")
    if importance_ratio is not None:
        kl = importance_ratio * kl
    return kl.clamp(-_LOW_VAR_BOUND, _LOW_VAR_BOUND) if kl_loss_type == "low_var_kl" else kl


def sequence_kl(old_log_probs: torch.Tensor, log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of old minus new log-probs over the unmasked tokens of one sequence: a scalar."""
    difference = torch.where(mask != 0, old_log_probs - log_probs, 0.0)
    return difference.sum() / mask.float().sum().clamp(min=1)
