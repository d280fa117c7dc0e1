"""Log-probs and entropies of a micro-batch's responses, from its logits."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from slime.config.loss import LogitsConfig
from slime.training.context_parallel import response_rows
from slime.training.nucleus_rows import nuclei_of_rows
from slime.training.parallel import ParallelContext
from slime.training.vocab_parallel import vocab_parallel_log_prob_entropy

# Logit of a token that is left out: its probability is exactly 0.
_NEVER = -1e30


def response_log_probs(
    config: LogitsConfig,
    logits: torch.Tensor,
    batch: Mapping[str, Any],
    context: ParallelContext | None = None,
    *,
    entropy_gradient: bool = True,
    temperature: float | None = None,
    whole_vocabulary: bool = False,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-prob of each response token under softmax(logits / rollout_temperature), and that row's entropy.

    With ``--rollout-top-p`` or ``--rollout-top-k`` a log-prob is that within the nucleus that the engine drew
    from.

    Args:
        logits: [1, T / cp, V / tp], this rank's rows and its slice of the vocabulary.
        batch: a micro-batch of `get_batch`.
        context: that of this rank, if not given.
        entropy_gradient: whether entropies are differentiated.
        temperature: in place of the rollout's.
        whole_vocabulary: of tokens that no engine drew: there are no nuclei.

    Returns:
        Per sample [R] float32 log-probs and entropies, whole ones on every context-parallel rank.

    Raises:
        ValueError: the nuclei are missing, or do not fit the responses.
    """
    context = context or ParallelContext.current()
    responses = response_rows(batch, context, logits.device)
    replays = config.replays_nucleus and not whole_vocabulary
    log_probs, entropies = vocab_parallel_log_prob_entropy(
        logits[0],
        responses.targets,
        context.tp_group,
        entropy_gradient=entropy_gradient,
        rows=responses.local,
        temperature=config.rollout_temperature if temperature is None else temperature,
        # The engine's vocabulary has no padding rows, so they must not take part in the softmax.
        vocab_size=config.vocab_size,
        chunk_size=config.log_probs_chunk_size,
        nuclei=nuclei_of_rows(batch, responses, config.vocab_size) if replays else None,
    )
    return responses.gather(log_probs), responses.gather(entropies)


def calculate_log_probs_and_entropy(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    tp_group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: torch.Tensor | None = None,
    with_entropy_grad: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-prob of one token per row of logits, and the entropies if they are asked for; for plug-ins.

    Args:
        logits: [T, V / tp] of any scale: nothing is divided by a temperature.
        tokens: [T] int64.
        log_prob_keep_mask: [T, V / tp] bool; log-probs are those within its tokens and the row's own.
        with_entropy_grad: whether entropies are differentiated.

    Returns:
        Log-probs [T, 1], or [0] of no rows, and entropies [T], which the mask does not touch; the latter are
        None unless ``with_entropy``.
    """
    log_probs, entropies = vocab_parallel_log_prob_entropy(
        logits, tokens, tp_group, entropy_gradient=with_entropy and with_entropy_grad, chunk_size=chunk_size
    )
    if log_prob_keep_mask is not None:
        width = logits.size(-1)
        mine = tokens - width * (dist.get_rank(tp_group) if tp_group is not None else 0)
        own = torch.arange(width, device=logits.device) == mine[:, None]
        within = logits.masked_fill(~(log_prob_keep_mask | own), _NEVER)
        log_probs, _ = vocab_parallel_log_prob_entropy(
            within, tokens, tp_group, entropy_gradient=False, chunk_size=chunk_size
        )
    return log_probs[:, None] if len(log_probs) else log_probs, entropies if with_entropy else None


_capture: list[list[torch.Tensor]] = []
"""What losses have captured; no list where nobody has asked for it."""


def enable_log_prob_capture(enabled: bool = True) -> None:
    """Has losses keep the log-probs that they train on, until these are drained; for plug-ins.

    Turned off, it forgets those that were kept.
    """
    _capture[:] = [[]] if enabled else []


def drain_captured_log_probs() -> list[torch.Tensor]:
    """Returns what was kept since the last call: per sample [R] float32 on the host, as they were trained.

    Samples are those of the micro-batches of a step, one micro-batch after the other.
    """
    found = list(_capture[0]) if _capture else []
    for captured in _capture:
        captured.clear()
    return found


def capture_log_probs(log_probs: Sequence[torch.Tensor]) -> None:
    """Keeps the log-probs of a micro-batch if asked for; not in a pass whose graph is computed again."""
    if _capture and torch.is_grad_enabled():
        _capture[0].extend(values.detach().cpu() for values in log_probs)
