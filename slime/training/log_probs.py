"""Log-probs and entropies of a micro-batch's responses, from its logits."""

from collections.abc import Mapping
from typing import Any

import torch

from slime.arguments.views import TrainingView
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
        logits: [1, T, V / tp], this rank's slice of the vocabulary.
        batch: a micro-batch of `get_batch`.
        context: that of this rank, if not given.
        entropy_gradient: whether entropies are differentiated.

    Returns:
        Per sample [R] float32 log-probs and entropies.
    """
    context = context or ParallelContext.current()
    rows, targets = _response_rows(batch, logits.device)
    log_probs, entropies = vocab_parallel_log_prob_entropy(
        logits[0],
        targets,
        context.tp_group,
        entropy_gradient=entropy_gradient,
        rows=rows,
        temperature=args.rollout_temperature,
        # The engine's vocabulary has no padding rows, so they must not take part in the softmax.
        vocab_size=args.vocab_size,
        chunk_size=args.log_probs_chunk_size,
    )
    lengths = batch["response_lengths"]
    return list(log_probs.split(lengths)), list(entropies.split(lengths))


def _response_rows(batch: Mapping[str, Any], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the packed logits that predict response tokens (P-1 ... L-2 of a sequence), and the tokens."""
    rows, targets, start = [], [], 0
    for tokens, response in zip(batch["unconcat_tokens"], batch["response_lengths"], strict=True):
        end = start + len(tokens) - 1
        rows.append(torch.arange(end - response, end, device=device))
        targets.append(tokens[len(tokens) - response :])
        start += len(tokens)
    return torch.cat(rows), torch.cat(targets)
