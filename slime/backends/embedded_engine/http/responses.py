"""Builds the objects that ``/generate`` answers with."""

import base64
import time
from typing import Any

import numpy as np

from slime.backends.embedded_engine.routes import encoded
from slime.backends.embedded_engine.sequence import Logprobs, Progress, Sequence, TopLogprobs
from slime.backends.embedded_engine.tokenizer import Tokenizer


class ResponseBuilder:
    """One request's view of its sequence; safe to use while the engine thread appends to it."""

    def __init__(
        self,
        sequence: Sequence,
        tokenizer: Tokenizer | None,
        text_in_logprobs: bool = False,
        prompt_ids: bool = False,
    ) -> None:
        self._sequence = sequence
        self._tokenizer = tokenizer
        self._text_in_logprobs = text_in_logprobs and tokenizer is not None
        self._prompt_ids = prompt_ids
        self._started = time.time()

    def build(
        self, text: str | None, version: str, start: int = 0, progress: Progress | None = None
    ) -> dict[str, Any]:
        """The response from token ``start`` to its ``progress``, or to where it is now.

        ``version`` is the engine's current one.
        """
        sequence = self._sequence
        progress = progress or sequence.progress
        answer: dict[str, Any] = {} if text is None else {"text": text}
        answer["output_ids"] = sequence.output_ids[start : progress.end]
        answer["meta_info"] = self._meta_info(version, start, progress)
        if self._prompt_ids:
            answer["prompt_token_ids"] = sequence.prompt_ids
        return answer

    def _meta_info(self, version: str, start: int, progress: Progress) -> dict[str, Any]:
        sequence, now = self._sequence, time.time()
        meta: dict[str, Any] = {
            "id": sequence.rid,
            "finish_reason": sequence.finish_reason if progress.finished else None,
            "prompt_tokens": len(sequence.prompt_ids),
            "weight_version": version,
            "num_retractions": sequence.num_retractions,
            "reasoning_tokens": 0,
            "completion_tokens": progress.end,
            "cached_tokens": sequence.cached_tokens,
            "cached_tokens_details": {"device": sequence.cached_tokens, "host": 0},
            "dp_rank": None,
            "e2e_latency": now - self._started,
            "response_sent_to_client_ts": now,
        }
        if progress.finished:
            meta["weight_versions"] = version_spans(sequence)
            meta |= _routes(sequence)
        meta |= _nuclei(sequence, start, progress.end)
        if sequence.logprob_options.wanted:
            meta |= self._logprobs(start, progress.end)
        return meta

    def _logprobs(self, start: int, end: int) -> dict[str, Any]:
        sequence, options = self._sequence, self._sequence.logprob_options
        prompt = sequence.prompt_logprobs
        # a sequence that was aborted before its prompt was computed has none
        prompt_ids = sequence.prompt_ids[options.prompt_start :] if prompt.of_tokens else []
        output_ids = sequence.output_ids[start:end]
        output = _slice(sequence.output_logprobs, start, end)
        if sequence.params.max_new_tokens == 0:
            output = sequence.output_logprobs  # rows of the token that is not wanted
        meta: dict[str, Any] = {
            "input_token_logprobs": self._triples(prompt.of_tokens, prompt_ids),
            "output_token_logprobs": self._triples(output.of_tokens, output_ids),
            "output_token_logprobs_length": end,
        }
        if options.top:
            meta["input_top_logprobs"] = self._rows(prompt.top)
            meta["output_top_logprobs"] = self._rows(output.top)
        if options.token_ids:
            meta["input_token_ids_logprobs"] = self._rows(prompt.of_ids)
            meta["output_token_ids_logprobs"] = self._rows(output.of_ids)
        return meta

    def _triples(self, values: list[float | None], ids: list[int]) -> list[tuple[Any, int, str | None]]:
        if not self._text_in_logprobs:
            return [(value, token, None) for value, token in zip(values, ids, strict=True)]
        return [(value, token, self._text(token)) for value, token in zip(values, ids, strict=True)]

    def _rows(self, rows: list[TopLogprobs | None]) -> list[list[tuple[float, int, str | None]] | None]:
        text = self._text if self._text_in_logprobs else lambda _: None
        return [None if row is None else [(v, token, text(token)) for v, token in row] for row in rows]

    def _text(self, token: int) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode([token], skip_special_tokens=False)


def _slice(logprobs: Logprobs, start: int, end: int) -> Logprobs:
    return Logprobs(logprobs.of_tokens[start:end], logprobs.top[start:end], logprobs.of_ids[start:end])


def _routes(sequence: Sequence) -> dict[str, Any]:
    """The experts of all tokens but the last one, which no forward pass has seen."""
    if sequence.routes_from is None:
        return {}
    routes = encoded(sequence.routes, sequence.routes_from, sequence.length - 1)
    if routes is None:
        return {}
    return {"routed_experts": routes, "routed_experts_start_len": sequence.routes_from}


def _nuclei(sequence: Sequence, start: int, end: int) -> dict[str, Any]:
    """Tells the nuclei of the tokens ``start:end``, as SGLang does and as the original's SGLang does."""
    nuclei, meta = sequence.nuclei[start:end], dict[str, Any]()
    if sequence.tells_mask:
        meta["output_token_sampling_mask"] = [nucleus.ids.tolist() for nucleus in nuclei]
        meta["output_token_sampling_logprobs"] = [nucleus.logprob for nucleus in nuclei]
        meta["output_token_sampling_mask_length"] = end
    if sequence.params.tells_nuclei:
        ids = [nucleus.ids for nucleus in nuclei]
        meta["top_p_token_ids"] = _base64(np.concatenate([np.zeros(0, np.int32), *ids]))
        meta["top_p_token_offsets"] = _base64(np.cumsum([0, *map(len, ids)], dtype=np.int32))
    return meta


def _base64(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode()


def version_spans(sequence: Sequence) -> list[dict[str, Any]]:
    """Which tokens of the response which weights made."""
    return [{"version": s.version, "start": s.start, "end": s.end} for s in sequence.spans]


def shown_ids(sequence: Sequence) -> list[int]:
    """Output ids that count as text: without the stop token, unless it is asked for."""
    reason = sequence.finish_reason or {}
    trims = isinstance(reason.get("matched"), int) and not sequence.params.no_stop_trim
    return sequence.output_ids[:-1] if trims else sequence.output_ids


def trim_stop(sequence: Sequence, text: str) -> str:
    """Text up to the stop string that ended it, or up to its end, if that is asked for.

    As in SGLang the text of a pattern stays.
    """
    match = (sequence.finish_reason or {}).get("matched")
    if not isinstance(match, str) or (start := text.find(match)) < 0:
        return text
    return text[: start + len(match)] if sequence.params.no_stop_trim else text[:start]


def final_text(sequence: Sequence, tokenizer: Tokenizer | None) -> str | None:
    """The response as text; None without a tokenizer."""
    if tokenizer is None:
        return None
    text = tokenizer.decode(shown_ids(sequence), sequence.params.skip_special_tokens)
    return trim_stop(sequence, text)
