"""A loss on its way into the backward pass of a trainer."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from slime.config.loss import LossConfig
from slime.training.losses.reducers import LossFunction, LossOutput, reducer_of
from slime.training.parallel import ParallelContext


def checked(function: LossFunction) -> LossFunction:
    """Checks and returns the loss; what is no loss is refused by the name of its function.

    Raises:
        TypeError: in the call, if the result is not (scalar tensor, metrics).
    """

    def call(*arguments: Any) -> LossOutput:
        output = function(*arguments)
        match output:
            case (torch.Tensor() as loss, Mapping() as metrics) if loss.numel() == 1:
                if all(isinstance(value, torch.Tensor) and value.numel() == 1 for value in metrics.values()):
                    return output
        called = getattr(function, "func", function)  # of a `functools.partial`
        name = f"{called.__module__}.{getattr(called, '__qualname__', called)}"
        raise TypeError(
            f"loss function {name}: returned {_described(output)} (wanted: a scalar tensor and a dict of "
            "metric names to scalar tensors)"
        )

    return call


def _described(output: Any) -> str:
    if isinstance(output, torch.Tensor):
        return f"a tensor of shape {list(output.shape)}"
    if isinstance(output, tuple | list):
        return f"{type(output).__name__} of {', '.join(map(_described, output)) or 'nothing'}"
    return "None" if output is None else f"{type(output).__name__} {str(output)[:60]}"


def counted_tokens(loss_masks: Sequence[torch.Tensor]) -> int:
    """The tokens of a micro-batch that a loss per token is divided by."""
    return sum(max(int(mask.sum()), 1) for mask in loss_masks)


def loss_function(
    config: LossConfig,
    batch: Mapping[str, Any],
    num_microbatches: int,
    step_global_batch_size: int,
    function: LossFunction,
    logits: torch.Tensor,
    context: ParallelContext | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The loss as megatron-core's schedule wants it: scaled such that its gradients come out as means.

    megatron-core divides by ``num_microbatches`` and averages over the ranks that share the weights, those of
    the data-parallel and the context-parallel groups; or, with ``--calculate-per-token-loss``, divides their
    sum by the sum of all normalisers. The ranks of a context-parallel group compute the same loss, and the
    gradients of each are a part of its gradient.

    Args:
        step_global_batch_size: rollouts of this optimizer step over all ranks.
        function: the loss.
        logits: [1, T / cp, V / tp].

    Returns:
        The scaled loss, the normaliser (int tensor), and {"keys": metric names, "values": [1 + metrics]
        float64}, whose first value is the number of tokens (per-token loss) or 0.
    """
    per_token = config.calculate_per_token_loss
    reducer = reducer_of(config, batch)
    if config.recompute_loss_function:
        loss, metrics = checkpoint(checked(function), batch, logits, reducer, use_reentrant=False)
    else:
        loss, metrics = checked(function)(batch, logits, reducer)
    tokens = counted_tokens(batch["loss_masks"])
    context = context or ParallelContext.current()
    if not per_token:
        loss = loss * (num_microbatches / step_global_batch_size * context.dp_size)
    if context.cp_size > 1:
        loss = loss * context.cp_size
    values = [torch.tensor(float(tokens if per_token else 0), dtype=torch.float64, device=logits.device)]
    values += [metric.detach().double().reshape(()) for metric in metrics.values()]
    normaliser = torch.tensor(tokens if per_token else 1, dtype=torch.int, device=logits.device)
    return loss, normaliser, {"keys": list(metrics), "values": torch.stack(values)}
