"""Log-probs of prompt tokens, taken while the prompt is computed."""

import torch

from slime.backends.embedded_engine.sequence import Logprobs, Sequence, TopLogprobs
from slime.backends.embedded_engine.serving_model import ServedModel

_ROWS = 256


def record_prompt_logprobs(
    model: ServedModel, sequence: Sequence, hidden: torch.Tensor, start: int, found: Logprobs
) -> None:
    """Adds to ``found`` what ``hidden`` tells about the prompt tokens after it; unscaled, as in SGLang.

    The first token of interest has nothing before it (or nothing that was asked for): null.

    Args:
        model: for its output head.
        sequence: whose prompt it is.
        hidden: ``[T, hidden]`` states of prompt positions ``start`` to ``start + T - 1``.
        start: position of the first.
        found: what earlier parts of the prompt gave, from position 0 on.
    """
    options = sequence.logprob_options
    if options.prompt_start is None:
        return
    if not found.of_tokens:
        found.of_tokens.append(None)
        found.top.append(None)
        found.of_ids.append(None)
    first = max(options.prompt_start, start)
    last = min(start + len(hidden), len(sequence.prompt_ids) - 1)
    for at in range(first, last, _ROWS):
        end = min(at + _ROWS, last)
        logprobs = model.logits(hidden[at - start : end - start]).log_softmax(-1)
        targets = torch.tensor(sequence.prompt_ids[at + 1 : end + 1], device=logprobs.device)
        _extend(found, logprobs, targets, options.top, list(options.token_ids))


def _extend(found: Logprobs, logprobs: torch.Tensor, targets: torch.Tensor, top: int, ids: list[int]) -> None:
    found.of_tokens.extend(logprobs.gather(1, targets[:, None])[:, 0].tolist())
    if top:
        values, tokens = logprobs.topk(min(top, logprobs.shape[1]))
        found.top.extend(_pairs(values.tolist(), tokens.tolist()))
    if ids:
        found.of_ids.extend(_pairs(logprobs[:, ids].tolist(), [ids] * len(logprobs)))


def _pairs(values: list[list[float]], tokens: list[list[int]]) -> list[TopLogprobs]:
    return [list(zip(v, t, strict=True)) for v, t in zip(values, tokens, strict=True)]
