"""How per-token values of a micro-batch become one number."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from slime.config.loss import LossConfig
from slime.utils.misc import load_function

Reducer = Callable[[torch.Tensor], torch.Tensor]
LossOutput = tuple[torch.Tensor, dict[str, torch.Tensor]]
LossFunction = Callable[[Mapping[str, Any], torch.Tensor, Reducer], LossOutput]
"""A loss of a micro-batch and its logits, to which the run's configuration is bound."""


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    sample_denoms: Sequence[float] | torch.Tensor | None = None,
    calculate_per_token_loss: bool = False,
) -> Reducer:
    """A function of concatenated per-token values [sum of R].

    By default the sum over samples of (masked sum / max(denominator, 1)), where the denominator is
    ``sample_denoms`` (the mask total of the whole rollout a sample belongs to), else the sample's own mask
    total. With ``calculate_per_token_loss`` the plain masked sum. The values are those of whole responses,
    also under context parallelism; the function refuses another number of them with a ValueError.
    """
    masks = [mask.float() for mask in loss_masks]
    if not calculate_per_token_loss:
        denominators = [mask.sum() for mask in masks] if sample_denoms is None else list(sample_denoms)
        masks = [mask / max(float(d), 1.0) for mask, d in zip(masks, denominators, strict=True)]
    weights = torch.cat(masks)

    def reduce(values: torch.Tensor) -> torch.Tensor:
        if values.shape != weights.shape:
            raise ValueError(f"per-token values {list(values.shape)}: wanted {list(weights.shape)}")
        # Not by multiplication alone: what is not trained may be infinite.
        return torch.where(weights != 0, values * weights, 0.0).sum()

    return reduce


def reducer_of(
    config: LossConfig, batch: Mapping[str, Any], masks: Sequence[torch.Tensor] | None = None
) -> Reducer:
    """The reducer of a micro-batch; other ``masks`` change what is summed, not the denominators."""
    return get_sum_of_sample_mean(
        batch["total_lengths"],
        batch["response_lengths"],
        batch["loss_masks"] if masks is None else masks,
        batch.get("rollout_mask_sums"),
        config.calculate_per_token_loss,
    )


def pg_reducer_of(
    config: LossConfig, batch: Mapping[str, Any], masks: Sequence[torch.Tensor], default: Reducer
) -> Reducer:
    """The reducer of the policy-gradient term alone, under the masks that a correction has left.

    ``--pg-loss-denominator`` N divides sums over a rollout by N, whatever
    its length (Dr. GRPO, arXiv 2503.20783, sec. 3.2); a function of the user's decides for itself.
    """
    if config.custom_pg_loss_reducer_function_path:
        custom = load_function(config.custom_pg_loss_reducer_function_path)
        lengths = batch["total_lengths"], batch["response_lengths"]
        reduce = custom(*lengths, masks, config.calculate_per_token_loss)
        trained = torch.cat(list(masks)) != 0
        return lambda values: reduce(torch.where(trained, values, 0.0))
    if config.pg_loss_denominator is not None:
        denominators = [config.pg_loss_denominator] * len(masks)
        return get_sum_of_sample_mean(batch["total_lengths"], batch["response_lengths"], masks, denominators)
    return default
