"""The loss of a critic."""

from collections.abc import Mapping
from typing import Any

import torch

from slime.config.policy import PolicyConfig
from slime.training.losses.reducers import LossOutput, Reducer
from slime.training.parallel import ParallelContext
from slime.training.values import response_values


def value_loss_function(
    config: PolicyConfig,
    batch: Mapping[str, Any],
    logits: torch.Tensor,
    sum_of_sample_mean: Reducer,
    context: ParallelContext | None = None,
) -> LossOutput:
    """The squared error of the values against the returns, with PPO's clipping.

    Args:
        batch: a micro-batch with ``values``, those before training, and ``returns``: per sample [R] float32.
        logits: [1, T, 1], the outputs of the critic's head.

    Returns:
        The loss, and its metrics as scalars reduced by ``sum_of_sample_mean``.
    """
    masks = torch.cat(batch["loss_masks"])
    new = torch.cat(response_values(logits, batch, context))
    # What is not trained has no gradient: elsewhere it may be 0 times infinity.
    new = torch.where(masks != 0, new, new.detach())
    errors, clipped = compute_value_loss(
        new, torch.cat(batch["values"]), torch.cat(batch["returns"]), config.loss.value_clip
    )
    loss = sum_of_sample_mean(errors)
    metrics = {"value_loss": loss, "value_clipfrac": sum_of_sample_mean(clipped)}
    return loss, {name: value.detach().clone() for name, value in metrics.items()}


def compute_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, value_clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The larger squared error of the value and of the value clipped around the old one, per token.

    As in OpenAI's implementation of PPO (openai/baselines, ppo2), without its factor of 1/2.

    Returns:
        The loss, and 1.0 where the value has left the range ``old_values`` +- ``value_clip``.
    """
    change = values - old_values
    clipped = old_values + change.clamp(-value_clip, value_clip)
    loss = torch.maximum((clipped - returns).square(), (values - returns).square())
    return loss, (change.abs() > value_clip).float()
