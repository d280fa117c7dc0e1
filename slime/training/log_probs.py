"""Log-probs and entropies of a micro-batch's responses, from its logits."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from slime.arguments.views import TrainingView
from slime.training.context_parallel import response_rows
from slime.training.parallel import ParallelContext
from slime.training.vocab_parallel import vocab_parallel_log_prob_entropy

# Logit of a padding row of the vocabulary: its probability is exactly 0.
_NEVER = -1e30


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
    rows, targets = responses.local, responses.targets
    # At least one chunk, even of no rows: a micro-batch of empty responses still has to reach the logits.
    num_rows = max(len(rows), 1)
    chunk = args.log_probs_chunk_size if args.log_probs_chunk_size > 0 else num_rows
    parts = [
        _of_rows(args, logits[0], rows[at : at + chunk], targets[at : at + chunk], context, entropy_gradient)
        for at in range(0, num_rows, chunk)
    ]
    log_probs, entropies = (responses.gather(torch.cat(part)) for part in zip(*parts, strict=True))
    return log_probs, entropies


def _of_rows(
    args: TrainingView,
    logits: torch.Tensor,
    rows: torch.Tensor,
    targets: torch.Tensor,
    context: ParallelContext,
    entropy_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    def compute(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = logits[rows].float() / args.rollout_temperature
        return vocab_parallel_log_prob_entropy(
            _without_padding(args, scaled, context),
            targets,
            context.tp_group,
            entropy_gradient=entropy_gradient,
        )

    if args.log_probs_chunk_size > 0 and torch.is_grad_enabled():
        # Else every chunk would keep its softmax, and chunks would save nothing.
        return checkpoint(compute, logits, use_reentrant=False)
    return compute(logits)


def _without_padding(args: TrainingView, logits: torch.Tensor, context: ParallelContext) -> torch.Tensor:
    """The engine's vocabulary has no padding rows, so they must not take part in the softmax."""
    real = args.vocab_size - context.tp_rank * logits.size(-1)
    if real >= logits.size(-1):
        return logits
    padding = torch.arange(logits.size(-1), device=logits.device) >= real
    return logits.masked_fill(padding, _NEVER)
