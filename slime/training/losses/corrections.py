"""Corrections for samples that another policy made: the engine's, or one some steps ago.

A correction for the engine is called with keywords (args, pg_loss, train_log_probs, rollout_log_probs,
loss_masks, total_lengths, response_lengths) and returns the corrected loss, the loss masks, and metrics per
token.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from slime.config.off_policy import OffPolicyConfig
from slime.training.kl import ratio_of, sequence_kl

Corrected = tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]


class HasOpsmDelta(Protocol):
    """``args``, of which OPSM reads one flag."""

    @property
    def opsm_delta(self) -> float: ...


def compute_opsm_mask(
    args: HasOpsmDelta,
    full_log_probs: Sequence[torch.Tensor],
    full_old_log_probs: Sequence[torch.Tensor],
    advantages: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Off-policy sequence masking: drops tokens with A < 0 of sequences beyond ``args.opsm_delta``.

    How far a sequence has drifted is its `sequence_kl`.

    Returns:
        Per token (concatenated) 0.0 where it is dropped, else 1.0; and the sum over samples of the share of
        their trained tokens that is dropped.
    """
    kept, shares = [], []
    samples = zip(full_log_probs, full_old_log_probs, advantages, loss_masks, strict=True)
    for new, old, advantage, mask in samples:
        dropped = ((advantage < 0) & (sequence_kl(old, new, mask) > args.opsm_delta)).float()
        kept.append(1 - dropped)
        shares.append((dropped * (mask != 0)).sum() / (mask != 0).sum().clamp(min=1))
    return torch.cat(kept), torch.stack(shares).sum()


def vanilla_tis_function(
    args: OffPolicyConfig,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: list[torch.Tensor],
    **_: Any,
) -> Corrected:
    """Truncated importance sampling between engine and trainer: the weight is clamped to its bounds."""
    weight = _engine_weight(train_log_probs, rollout_log_probs)
    clipped = weight.clamp(args.tis_clip_low, args.tis_clip)
    return pg_loss * clipped, loss_masks, _tis_metrics(weight, clipped != weight)


def icepop_function(
    args: OffPolicyConfig,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: list[torch.Tensor],
    **_: Any,
) -> Corrected:
    """IcePop: as `vanilla_tis_function`, but tokens whose weight is out of bounds are dropped."""
    weight = _engine_weight(train_log_probs, rollout_log_probs)
    inside = (weight >= args.tis_clip_low) & (weight <= args.tis_clip)
    return torch.where(inside, pg_loss * weight, 0.0), loss_masks, _tis_metrics(weight, ~inside)


def _engine_weight(train: Sequence[torch.Tensor], rollout: Sequence[torch.Tensor]) -> torch.Tensor:
    return ratio_of(torch.cat(list(train)) - torch.cat(list(rollout))).detach()


def _tis_metrics(weight: torch.Tensor, out_of_bounds: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"tis": weight, "tis_clipfrac": out_of_bounds.float(), "tis_abs": (weight - 1).abs()}
