"""Stop strings, which end an answer and are no part of its text, as providers' APIs have it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def untold_stops(sampling: Mapping[str, Any], call_ends: bool) -> list[str]:
    """The stop strings of a request that agents are not told; none under ``no_stop_trim``.

    Args:
        call_ends: the last one is the end of a call, which belongs to the answer.
    """
    stop = sampling.get("stop") or []
    stops = [stop] if isinstance(stop, str) else [*stop]
    stops = [] if sampling.get("no_stop_trim") else stops[: len(stops) - call_ends]
    return [stop for stop in stops if stop]


def without_stop(
    ids: Sequence[int], meta: Mapping[str, Any], stops: Sequence[str], text_of: Callable[[Sequence[int]], str]
) -> str:
    """The text of an answer up to the stop string that ended it. All of its tokens stay what was sampled.

    Args:
        meta: ``meta_info`` of the engine's answer.
        stops: those that are not told.
    """
    text, stop = text_of(ids), (meta.get("finish_reason") or {}).get("matched")
    if not isinstance(stop, str) or stop not in stops or stop not in text:
        return text
    # The last token completes it; an earlier one, which min_new_tokens passes over, ends nothing.
    begins = max(len(text_of(ids[:-1])) - len(stop) + 1, 0)
    at = text.find(stop, begins)
    return text[: at if at >= 0 else text.rfind(stop)]


def until_any(text: str, strings: Sequence[str]) -> str:
    """A text that grows, up to the first of some strings, or to what may be the beginning of one."""
    for string in strings:
        text = text.partition(string)[0]
    begun = max((_begun(text, string) for string in strings), default=0)
    return text[: len(text) - begun]


def _begun(text: str, string: str) -> int:
    """With how many characters a string has begun at the end of a text."""
    return next((n for n in range(len(string) - 1, 0, -1) if text.endswith(string[:n])), 0)
