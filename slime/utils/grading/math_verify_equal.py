"""Equality of answers as mathematics, by math-verify. For grading processes: sympy may take for ever."""

from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from slime.utils.grading.bounds import is_within_bounds
from slime.utils.grading.no_evaluation import nothing_evaluated

_CONFIG = [LatexExtractionConfig(boxed_match_priority=0)]
_LABELS = 1024


class LabelError(ValueError):
    """The label is at fault, not the answer."""


def are_equal(gold: str, answer: str) -> bool:
    """Whether two answers, written as the content of a box, are equal. One that is out of bounds is not.

    math-verify's own time limits are off: they use a Python signal handler, which cannot interrupt
    big-integer C code.

    Raises:
        LabelError: the gold answer is no mathematics.
    """
    # Not under the cache: sympy's objects compare by value, and verify changes none of them.
    parsed = _parse_label(gold)
    if not parsed:
        raise LabelError(f"the label {gold!r} is no mathematical expression")
    if not is_within_bounds(answer, gold):
        return False
    return bool(verify(parsed, _parse(answer), timeout_seconds=None))


def _parse(answer: str) -> list[Any]:
    with nothing_evaluated():
        return parse(f"\\boxed{{{answer}}}", extraction_config=_CONFIG, parsing_timeout=None)


@lru_cache(_LABELS)
def _parse_label(gold: str) -> list[Any]:
    """Parses every label once: the answers of a group have it in common."""
    return _parse(gold)
