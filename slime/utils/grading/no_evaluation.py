"""No text becomes code while an answer is read, whichever library reads it.

sympy makes numbers of strings, and much else, by way of ``eval``; math-verify asks it to. The tokens that
reach it are digits today, and nothing here depends on that.
"""

import ast
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any

import sympy
from sympy.parsing import sympy_parser

from slime.utils.grading.formula import build_formula
from slime.utils.grading.magnitude import FormulaError


@contextmanager
def nothing_evaluated() -> Iterator[None]:
    """Whatever asks sympy for an expression of a text gets a formula or a FormulaError.

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
