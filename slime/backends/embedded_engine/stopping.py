"""Decides when a response is over."""

from typing import Any

import regex

from slime.backends.embedded_engine.sequence import Sequence, abort_reason, length_reason
from slime.backends.embedded_engine.tokenizer import GrowingText, Tokenizer

_REGEX_SECONDS = 0.05
_WINDOW = 4096
"""Characters that the newest token may have completed a match in."""


class StopChecker:
    """Looks at a sequence after each token; the text is decoded only where a stop string is wanted."""

    def __init__(self, eos_token_ids: frozenset[int], tokenizer: Tokenizer | None) -> None:
        extra = tokenizer.eos_token_id if tokenizer else None
        self.eos_token_ids = eos_token_ids | ({extra} if extra is not None else set())
        self._tokenizer = tokenizer
        self._texts: dict[Sequence, GrowingText] = {}

    def stop_ids(self, sequence: Sequence) -> frozenset[int]:
        """Ids that end the sequence; as in SGLang, ``ignore_eos`` switches off both kinds."""
        if sequence.params.ignore_eos:
            return frozenset()
        return self.eos_token_ids | sequence.params.stop_token_ids

    def reason(self, sequence: Sequence, token: int) -> dict[str, Any] | None:
        """The finish reason after ``token`` was appended, or None if it goes on."""
        params = sequence.params
        # In this order, and strings whatever min_new_tokens is, which holds back tokens alone.
        if (params.stop or params.stop_regex) and (reason := self._text_reason(sequence)):
            return reason
        enough = len(sequence.output_ids) >= params.min_new_tokens
        if enough and token in self.stop_ids(sequence):
            return {"type": "stop", "matched": token}
        if len(sequence.output_ids) >= params.max_new_tokens:
            return length_reason(sequence)
        if sequence.constraint is not None and sequence.constraint.complete:
            return {"type": "stop", "matched": token}
        return None

    def forget(self, sequence: Sequence) -> None:
        self._texts.pop(sequence, None)

    def _text_reason(self, sequence: Sequence) -> dict[str, Any] | None:
        if self._tokenizer is None:
            return None
        growing = self._texts.get(sequence)
        if growing is None:
            growing = self._texts[sequence] = GrowingText(self._tokenizer, False)
        text = growing.update(sequence.output_ids)
        window = text[-_WINDOW:]
        longest = max(map(len, sequence.params.stop), default=0)
        end = text[-_WINDOW - longest :]
        for stop in sequence.params.stop:
            if stop in end:
                return {"type": "stop", "matched": stop}
        for pattern in sequence.params.stop_regex:
            try:
                found = regex.search(pattern, window, timeout=_REGEX_SECONDS)
            except TimeoutError:
                return abort_reason(f"stop_regex {pattern!r} takes too long to match", 400, "BadRequestError")
            if found:
                return {"type": "stop", "matched": pattern}
        return None
