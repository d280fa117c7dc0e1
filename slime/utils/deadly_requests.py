"""Requests that end the scheduler of SGLang 0.5.23, and with it an engine and all that it works on.

A router would hand such a request to the next engine after it, until none is left.
"""

from collections.abc import Iterator, Mapping
from typing import Any


class DeadlyRequest(ValueError):
    """A request that is not sent, since it would end the engine."""


def refuse_deadly(payload: Mapping[str, Any], vocab_size: int | None = None) -> None:
    """Looks at what is to be sent to ``/generate``.

    Args:
        vocab_size: of the served model, if it is known.

    Raises:
        DeadlyRequest: a prompt without tokens, a token that the model has not, log-probs from before it, or
            a list of adapters for a single prompt.
    """
    ids, texts = payload.get("input_ids"), payload.get("text")
    # an empty list of ids is no prompt at all, and refused by the engine
    for prompt in _rows(ids) if ids else ():
        _check_ids(prompt, vocab_size)
    if ids is None and any(text == "" for text in ([texts] if isinstance(texts, str) else texts or ())):
        raise DeadlyRequest("text: empty, wanted at least one token (SGLang ends with it)")
    starts = payload.get("logprob_start_len")
    for start in starts if isinstance(starts, list) else [starts]:
        if isinstance(start, int) and start < -1:
            raise DeadlyRequest(f"logprob_start_len: {start}, wanted -1 or more (SGLang ends with it)")
    alone = isinstance(texts, str) or (isinstance(ids, list) and ids and isinstance(ids[0], int))
    if alone and isinstance(payload.get("lora_path"), list):
        raise DeadlyRequest("lora_path: a list for a single prompt, wanted a name (SGLang ends with it)")


def _rows(ids: Any) -> Iterator[list[Any]]:
    if isinstance(ids, list):
        yield from ids if isinstance(ids[0], list) else [ids]


def _check_ids(prompt: Any, vocab_size: int | None) -> None:
    if not isinstance(prompt, list):
        return  # the engine says what is wrong with it
    if not prompt:
        raise DeadlyRequest("input_ids: an empty prompt, wanted at least one token (SGLang ends with it)")
    try:
        lowest, highest = min(prompt), max(prompt)
    except TypeError:
        return
    if lowest < 0 or (vocab_size is not None and highest >= vocab_size):
        wrong = lowest if lowest < 0 else highest
        most = "" if vocab_size is None else f" to {vocab_size - 1}"
        raise DeadlyRequest(f"input_ids: token {wrong}, wanted 0{most or ' or more'} (SGLang ends with it)")
