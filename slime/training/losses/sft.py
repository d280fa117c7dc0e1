"""The loss of supervised fine-tuning."""

from collections.abc import Mapping
from typing import Any

import torch

from slime.arguments.views import TrainingView
from slime.training.log_probs import response_log_probs
from slime.training.losses.reducers import LossOutput, Reducer
from slime.training.parallel import ParallelContext


def sft_loss_function(
    args: TrainingView,
    batch: Mapping[str, Any],
    logits: torch.Tensor,
    sum_of_sample_mean: Reducer,
    context: ParallelContext | None = None,
) -> LossOutput:
    """Negative log-likelihood of the trained tokens."""
    log_probs, _ = response_log_probs(args, logits, batch, context, entropy_gradient=False)
    loss = -sum_of_sample_mean(torch.cat(log_probs))
    return loss, {"loss": loss.detach().clone()}
