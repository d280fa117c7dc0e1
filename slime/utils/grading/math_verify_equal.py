"""Equality of answers as mathematics, by math-verify. For grading processes: sympy may take for ever."""

import ast
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse, verify
from sympy.parsing import sympy_parser

from slime.utils.grading.formula import build_formula
from slime.utils.grading.magnitude import FormulaError

_CONFIG = [LatexExtractionConfig(boxed_match_priority=0)]
_LABELS = 1024
_DEEPEST = 15
_LONGEST = 2000
_MAX_BARS = 40
_CHAIN = re.compile(r"(?:\w?[-_^!]){40}|(?:!\s*[)}\]]\s*){3}|(?:\^\{?\w+\}?\s*[)}\]]\s*){4}")
"""Powers of powers, indices of indices, signs before signs; factorials of factorials, in brackets."""
_LEVEL = re.compile(r"(?P<opens>[(\[{]|\\begin\b)|(?P<closes>[)\]}]|\\end\b)")


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
        raise LabelError(f"the label {gold!r} is not a mathematical expression")
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


def is_within_bounds(answer: str, gold: str) -> bool:
    """Whether an answer is no longer and no deeper than answers are; the label, if it is, may be matched.

    The parser of LaTeX tries many ways for each level of brackets, and would take for ever beyond.
    """
    if len(answer) > max(_LONGEST, 2 * len(gold)):
        return False
    if depth(answer) > max(_DEEPEST, depth(gold)):
        return False
    if answer.count("|") > max(_MAX_BARS, gold.count("|")):
        return False
    return not _CHAIN.search(answer) or bool(_CHAIN.search(gold))


def depth(text: str) -> int:
    """Levels of brackets that are open at the same time at most; what closes none counts for nothing."""
    level = deepest = 0
    for found in _LEVEL.finditer(text):
        level = level + 1 if found["opens"] else max(0, level - 1)
        deepest = max(deepest, level)
    return deepest


@contextmanager
def nothing_evaluated() -> Iterator[None]:
    """Whatever asks sympy for an expression of a text gets a formula or a FormulaError.

    sympy makes numbers of strings, and much else, by way of ``eval``; math-verify asks it to. The tokens that
    reach it are digits today, and nothing here depends on that.

    Of the whole process, so for one that reads one answer at a time. Of reading only: where sympy computes,
    it imports parts of itself, which evaluate strings of their own.
    """
    evaluate = sympy_parser.eval_expr
    sympy_parser.eval_expr = _read
    try:
        yield
    finally:
        sympy_parser.eval_expr = evaluate


def _read(code: str | CodeType, names: Mapping[str, Any], more_names: Mapping[str, Any]) -> sympy.Expr:
    """Reads, in place of ``eval``, the line of Python that sympy has made of a text."""
    if not isinstance(code, str):
        raise FormulaError("a compiled expression (wanted: its text)")
    return build_formula(ast.parse(code, mode="eval").body)
