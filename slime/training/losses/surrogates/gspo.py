"""GSPO's surrogate: PPO's, with one ratio for each sequence."""

from collections.abc import Sequence

import torch

from slime.config.loss import LossConfig
from slime.training.kl import sequence_kl
from slime.training.losses.surrogates.ppo import clipped
from slime.training.losses.surrogates.tokens import PolicyTokens, Surrogate, with_trained_gradient


def sequence_surrogate(config: LossConfig, tokens: PolicyTokens) -> Surrogate:
    """The clipped surrogate of the ratio that `compute_gspo_kl` gives."""
    return clipped(config, tokens, compute_gspo_kl(tokens.new, tokens.old, tokens.new, tokens.masks))


def compute_gspo_kl(
    full_log_probs: Sequence[torch.Tensor],
    full_old_log_probs: Sequence[torch.Tensor],
    local_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
) -> torch.Tensor:
    """GSPO's negated log-ratio (arXiv 2507.18071, eq. 7): each sequence's `sequence_kl` at all its tokens.

    Args:
        local_log_probs: give the lengths of the result; responses come whole, so these are the full ones.
    """
    samples = zip(full_log_probs, full_old_log_probs, local_log_probs, strict=True)
    spread = [
        sequence_kl(old, new, mask).expand_as(local)
        for (new, old, local), mask in zip(samples, loss_masks, strict=True)
    ]
    return torch.cat(with_trained_gradient(spread, loss_masks))
