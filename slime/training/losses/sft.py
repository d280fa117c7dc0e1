"""The loss of supervised fine-tuning."""

from collections.abc import Mapping
from typing import Any

import torch

from slime.config.policy import PolicyConfig
from slime.training.log_probs import capture_log_probs, response_log_probs
from slime.training.losses.reducers import LossOutput, Reducer
from slime.training.parallel import ParallelContext


def sft_loss_function(
    config: PolicyConfig,
    batch: Mapping[str, Any],
    logits: torch.Tensor,
    sum_of_sample_mean: Reducer,
    context: ParallelContext | None = None,
) -> LossOutput:
    """Negative log-likelihood of the trained tokens."""
    log_probs, _ = response_log_probs(config.logits, logits, batch, context, entropy_gradient=False)
    capture_log_probs(log_probs)
    loss = -sum_of_sample_mean(torch.cat(log_probs))
    return loss, {"loss": loss.detach().clone()}
