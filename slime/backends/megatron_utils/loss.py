"""Losses: functions of a micro-batch and its logits."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from slime.backends.megatron_utils.log_probs import get_log_probs_and_entropy
from slime.backends.megatron_utils.parallel import ParallelContext
from slime.backends.megatron_utils.policy_loss import policy_loss_function
from slime.backends.megatron_utils.reducers import Reducer, get_sum_of_sample_mean
from slime.utils.misc import load_function

LossOutput = tuple[torch.Tensor, dict[str, torch.Tensor]]
LossFunction = Callable[[Namespace, Mapping[str, Any], torch.Tensor, Reducer], LossOutput]


def sft_loss_function(
    args: Namespace,
    batch: Mapping[str, Any],
    logits: torch.Tensor,
    sum_of_sample_mean: Reducer,
    context: ParallelContext | None = None,
) -> LossOutput:
    """Negative log-likelihood of the trained tokens."""
    log_probs, _ = get_log_probs_and_entropy(args, logits, batch, context)
    loss = -sum_of_sample_mean(torch.cat(log_probs))
    return loss, {"loss": loss.detach().clone()}


def select_loss(args: Namespace, context: ParallelContext) -> LossFunction:
    """The loss of ``--loss-type``; a custom one is called with (args, batch, logits, sum_of_sample_mean)."""
    if args.loss_type == "policy_loss":
        return partial(policy_loss_function, context=context)
    if args.loss_type == "sft_loss":
        return partial(sft_loss_function, context=context)
    if args.loss_type == "custom_loss" and args.custom_loss_function_path:
        return load_function(args.custom_loss_function_path)
    raise ValueError(
        f"--loss-type {args.loss_type}: wanted policy_loss, sft_loss or custom_loss with its path"
    )


def loss_function(
    args: Namespace,
    batch: Mapping[str, Any],
    num_microbatches: int,
    step_global_batch_size: int,
    context: ParallelContext,
    logits: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The loss as megatron-core's schedule wants it: scaled such that its gradients come out as means.

    megatron-core divides by ``num_microbatches`` and averages over the data-parallel group, or, with
    ``--calculate-per-token-loss``, divides by the sum of all normalisers.

    Args:
        step_global_batch_size: rollouts of this optimizer step over all ranks.
        logits: [1, T, V / tp].

    Returns:
        The scaled loss, the normaliser (int tensor), and {"keys": metric names, "values": [1 + metrics]},
        whose first value is the number of tokens (per-token loss) or 0.
    """
    per_token = args.calculate_per_token_loss
    reducer = get_sum_of_sample_mean(
        batch["total_lengths"],
        batch["response_lengths"],
        batch["loss_masks"],
        batch.get("rollout_mask_sums"),
        per_token,
    )
    function = select_loss(args, context)
    if args.recompute_loss_function:
        loss, metrics = checkpoint(function, args, batch, logits, reducer, use_reentrant=False)
    else:
        loss, metrics = function(args, batch, logits, reducer)
    tokens = sum(max(int(mask.sum()), 1) for mask in batch["loss_masks"])
    if not per_token:
        loss = loss * (num_microbatches / step_global_batch_size * context.dp_size)
    values = [torch.tensor(float(tokens if per_token else 0), device=logits.device)]
    values += [metric.detach().float().reshape(()) for metric in metrics.values()]
    normaliser = torch.tensor(tokens if per_token else 1, dtype=torch.int, device=logits.device)
    return loss, normaliser, {"keys": list(metrics), "values": torch.stack(values)}
