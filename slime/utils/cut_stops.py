"""Stop strings that are cut in two where an answer was aborted and goes on in another request.

The engine that goes on with it looks for them in what it makes, and misses one that has begun before.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime.utils.engine_meta import nuclei_of_first, routed_experts_of_first

TextOf = Callable[[Sequence[int]], str]

PARTED = "\ufffd"
"""What a text has for the first bytes of a character whose others are not there yet."""

PER_TOKEN = (
    *("output_token_logprobs", "output_top_logprobs"),
    *("output_token_sampling_mask", "output_token_sampling_logprobs"),
)
"""Lists of an answer that have an entry for each token."""


class StopsAcrossCuts:
    """The stop strings of a request.

    Args:
        text_of: without it none is found.
    """

    def __init__(self, stops: str | Sequence[str] | None, text_of: TextOf | None) -> None:
        self._stops = [stops] if isinstance(stops, str) else list(stops or ())
        self._longest = max(map(len, self._stops), default=0)
        # A character's bytes may be spread over as many tokens.
        self._most_tokens = max((len(stop.encode()) for stop in self._stops), default=0)
        self._text_of = text_of

    def find(self, before: Sequence[int], new: Sequence[int]) -> tuple[int, str] | None:
        """With how many of the new tokens a stop string is there that begins before them, and which one."""
        if self._text_of is None or not (self._stops and before):
            return None
        tail = [*before[-self._most_tokens :]]
        told = self._text_of(tail)
        start, whole = len(told), len(told.rstrip(PARTED))
        for count in range(1, len(new) + 1):
            text = self._text_of([*tail, *new[:count]])
            for stop in self._stops:
                if 0 <= text.find(stop, max(whole - len(stop) + 1, 0)) < start:
                    return count, stop
            if len(text) - start >= self._longest:
                break
        return None

    def note(self, before: Sequence[int], answer: Mapping[str, Any]) -> bool:
        """Ends an answer behind other tokens where a token completes such a stop string, if one does."""
        meta = answer["meta_info"]
        found = self.find(before, [triple[1] for triple in meta.get("output_token_logprobs") or ()])
        if found is None:
            return False
        count, stop = found
        meta |= _of_first(meta, count)
        for name in PER_TOKEN:
            if name in meta:
                meta[name] = meta[name][:count]
        meta |= {"finish_reason": {"type": "stop", "matched": stop}, "completion_tokens": count}
        if spans := meta.get("weight_versions"):
            meta["weight_versions"] = [
                {**span, "end": min(span["end"], count)} for span in spans if span["start"] < count
            ]
        return True


def _of_first(meta: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Nuclei and routed experts of an answer's first tokens, where it has some in arrays."""
    nuclei = {} if "output_token_sampling_mask" in meta else nuclei_of_first(meta, count)
    return nuclei | routed_experts_of_first(meta, count)
