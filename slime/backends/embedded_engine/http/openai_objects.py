"""Response objects of the OpenAI endpoints."""

from typing import Any

from slime.backends.embedded_engine.sequence import Progress, Sequence, TopLogprobs
from slime.backends.embedded_engine.tokenizer import Tokenizer


def finish_fields(sequence: Sequence, progress: Progress) -> dict[str, Any]:
    reason = (sequence.finish_reason or {}) if progress.finished else {}
    return {"finish_reason": reason.get("type"), "matched_stop": reason.get("matched")}


def usage(sequences: list[Sequence], prompts: int) -> dict[str, Any]:
    """Token counts; samples of one prompt count its tokens once."""
    samples = max(len(sequences) // prompts, 1)
    prompt = sum(len(s.prompt_ids) for s in sequences[::samples])
    completion = sum(len(s.output_ids) for s in sequences)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


def completion_logprobs(
    sequence: Sequence, tokenizer: Tokenizer, start: int, end: int, prompt: bool
) -> dict[str, Any]:
    """Log-probs of output tokens ``[start, end)`` in the form of ``/v1/completions``.

    With ``prompt``, those of the prompt come first, as far as they were asked for.
    """
    found, ids = sequence.output_logprobs, sequence.output_ids[start:end]
    values, rows = found.of_tokens[start:end], found.top[start:end]
    before = sequence.prompt_logprobs
    if prompt and before.of_tokens:
        ids, values = sequence.prompt_ids + ids, before.of_tokens + values
        rows = before.top[: len(before.of_tokens)] + rows
    return {
        "tokens": [_text(tokenizer, token) for token in ids],
        "token_logprobs": values,
        "top_logprobs": [_by_text(tokenizer, row) for row in rows],
        "text_offset": [-1] * len(ids),
    }


def _by_text(tokenizer: Tokenizer, row: TopLogprobs | None) -> dict[str, float] | None:
    return None if row is None else {_text(tokenizer, token): value for value, token in row}


def chat_logprobs(sequence: Sequence, tokenizer: Tokenizer, start: int, end: int) -> dict[str, Any]:
    """Log-probs of output tokens ``[start, end)`` in the form of ``/v1/chat/completions``."""
    found = sequence.output_logprobs
    rows: list[TopLogprobs | None] = found.top[start:end] or [None] * (end - start)
    content = []
    for value, token, row in zip(
        found.of_tokens[start:end], sequence.output_ids[start:end], rows, strict=False
    ):
        top = [_entry(tokenizer, other, logprob) for logprob, other in row or []]
        content.append({**_entry(tokenizer, token, value), "top_logprobs": top})
    return {"content": content}


def _entry(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, Any]:
    text = _text(tokenizer, token)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.decode([token], skip_special_tokens=False)
