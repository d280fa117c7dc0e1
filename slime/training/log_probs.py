"""Log-probs and entropies of a micro-batch's responses, from its logits."""

from collections.abc import Mapping
from typing import Any

import torch

from slime.arguments.views import TrainingView
from slime.training.context_parallel import response_rows
from slime.training.parallel import ParallelContext
from slime.training.vocab_parallel import vocab_parallel_log_prob_entropy


def get_log_probs_and_entropy(
    args: TrainingView,
    logits: torch.Tensor,
    batch: Mapping[str, Any],
    context: ParallelContext | None = None,
    *,
    entropy_gradient: bool = False,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-prob of each response token under softmax(logits / rollout_temperature), and that row's entropy.

    Args:
        logits: [1, T / cp, V / tp], this rank's rows and its slice of the vocabulary.
        batch: a micro-batch of `get_batch`.
        context: that of this rank, if not given.
        entropy_gradient: whether entropies are differentiated.

    Returns:
        Per sample [R] float32 log-probs and entropies, whole ones on every context-parallel rank.
    """
    context = context or ParallelContext.current()
    responses = response_rows(batch, context, logits.device)
    log_probs, entropies = vocab_parallel_log_prob_entropy(
        logits[0],
        responses.targets,
        context.tp_group,
        entropy_gradient=entropy_gradient,
        rows=responses.local,
        temperature=args.rollout_temperature,
        # The engine's vocabulary has no padding rows, so they must not take part in the softmax.
        vocab_size=args.vocab_size,
        chunk_size=args.log_probs_chunk_size,
    )
    return responses.gather(log_probs), responses.gather(entropies)
