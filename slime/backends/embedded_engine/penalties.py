"""Changes to the logits of single sequences: penalties, biases, a grammar, tokens that may not come yet."""

import torch

from slime.backends.embedded_engine.sequence import Sequence


def adjust_logits(logits: torch.Tensor, sequence: Sequence, stop_ids: frozenset[int]) -> None:
    """Applies a sequence's penalties, biases, grammar and ``min_new_tokens`` in place.

    Penalties look at response tokens only, as in SGLang.

    Args:
        logits: ``[vocab]`` float32.
        sequence: with its response so far.
        stop_ids: ids that would end it.
    """
    params = sequence.params
    if params.frequency_penalty or params.presence_penalty:
        ids, counts = _response(sequence, logits).unique(return_counts=True)
        logits[ids] -= params.frequency_penalty * counts + params.presence_penalty
    if params.repetition_penalty != 1.0:
        seen = _response(sequence, logits).unique()
        values = logits[seen]
        penalised = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
        logits[seen] = penalised
    for token, bias in params.logit_bias:
        logits[token] += bias
    if sequence.constraint is not None:
        sequence.constraint.restrict(logits)
    if len(sequence.output_ids) < params.min_new_tokens:
        logits[[token for token in stop_ids if token < len(logits)]] = float("-inf")


def _response(sequence: Sequence, logits: torch.Tensor) -> torch.Tensor:
    """The tokens of the response so far, int64 beside the logits."""
    return torch.tensor(sequence.output_ids, dtype=torch.int64, device=logits.device)
