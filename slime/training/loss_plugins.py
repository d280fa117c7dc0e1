"""What losses of the user's call for log-probs and values, with the arguments that the original takes.

Our own losses hand a whole micro-batch to `response_log_probs` and `response_values`; these take its parts.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slime.arguments.views import TrainingView
from slime.config.run import run_config
from slime.training import advantages
from slime.training.context_parallel import segment_multiple
from slime.training.log_probs import response_log_probs
from slime.training.losses import policy, sft, value
from slime.training.losses.reducers import LossOutput, Reducer
from slime.training.parallel import ParallelContext
from slime.training.values import response_values
from slime.utils.types import RolloutBatch

Tensors = list[torch.Tensor]


class Results(tuple[torch.Tensor, dict[str, Tensors]]):
    """An empty tensor and results by name, as ``_, results = ...``; or asked by name: ``...["log_probs"]``.

    Versions of the original differ in which of the two they return.
    """

    def __new__(cls, results: dict[str, Tensors]) -> "Results":
        device = next((tensor.device for tensors in results.values() for tensor in tensors), None)
        return super().__new__(cls, (torch.empty(0, device=device), results))

    def __getitem__(self, key: Any) -> Any:
        return self[1][key] if isinstance(key, str) else super().__getitem__(key)


def get_log_probs_and_entropy(
    logits: torch.Tensor,
    *,
    args: TrainingView,
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
) -> Results:
    """``log_probs`` of the response tokens and, ``with_entropy``, ``entropy``: per sample [R] float32.

    Both are differentiable, and whole responses on every context-parallel rank.

    Args:
        logits: [1, T / cp, V / tp], as a loss gets them; they are divided by the rollout temperature.
        unconcat_tokens, total_lengths, response_lengths: entries of the micro-batch.
        non_loss_data: has no effect.
    """
    batch = _batch(logits, unconcat_tokens, total_lengths, response_lengths)
    log_probs, entropies = response_log_probs(args, logits, batch, entropy_gradient=with_entropy)
    return Results({"log_probs": log_probs, **({"entropy": entropies} if with_entropy else {})})


def get_values(
    logits: torch.Tensor,
    *,
    args: TrainingView,
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
) -> Results:
    """``values`` of the states before the response tokens, per sample [R] float32, off a critic's outputs.

    Args:
        logits: [1, T / cp, 1], which no temperature divides.
        with_entropy, non_loss_data: have no effect.
    """
    batch = _batch(logits, unconcat_tokens, total_lengths, response_lengths)
    return Results({"values": response_values(logits, batch)})


def policy_loss_function(
    args: Namespace, batch: Mapping[str, Any], logits: torch.Tensor, sum_of_sample_mean: Reducer
) -> LossOutput:
    """Returns the policy loss of a micro-batch, for a loss of the user's that adds to it."""
    return policy.policy_loss_function(run_config(args), batch, logits, sum_of_sample_mean)


def sft_loss_function(
    args: Namespace, batch: Mapping[str, Any], logits: torch.Tensor, sum_of_sample_mean: Reducer
) -> LossOutput:
    """Returns the loss of supervised fine-tuning of a micro-batch."""
    return sft.sft_loss_function(run_config(args), batch, logits, sum_of_sample_mean)


def value_loss_function(
    args: Namespace, batch: Mapping[str, Any], logits: torch.Tensor, sum_of_sample_mean: Reducer
) -> LossOutput:
    """Returns the loss of a critic on a micro-batch."""
    return value.value_loss_function(run_config(args), batch, logits, sum_of_sample_mean)


def compute_advantages_and_returns(args: Namespace, rollout_data: RolloutBatch) -> None:
    """Adds ``kl``, ``advantages`` and ``returns`` to ``rollout_data``."""
    advantages.compute_advantages_and_returns(run_config(args), rollout_data)


def _batch(
    logits: torch.Tensor,
    tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
) -> dict[str, Any]:
    """The parts, with the lengths of the packed row's segments; how much padding it has, ``logits`` tell."""
    context = ParallelContext.current()
    multiple = segment_multiple(context)
    segments = [length + -length % multiple for length in total_lengths]
    padding = logits.size(1) * context.cp_size - sum(segments)
    return {
        "unconcat_tokens": tokens,
        "response_lengths": response_lengths,
        "segment_lengths": [*segments, *([padding] if padding else [])],
    }
