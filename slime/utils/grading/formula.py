"""Formulas that a model wrote, as expressions of sympy's. They are read, never evaluated.

``parse_expr`` makes a line of Python of a formula and gives it to ``eval``. Here sympy's rules of spelling
(implied products, factorials, repeating decimals) make the same line, and of that line's syntax tree only
numbers, symbols, arithmetic and a few functions become an expression, node by node.
"""

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

import sympy
from sympy.parsing.sympy_parser import (
    implicit_multiplication_application,
    standard_transformations,
    stringify_expr,
)

from slime.utils.grading.magnitude import FormulaError, check_degrees, check_factorial, check_power

LONGEST = 1000
"""Characters of a formula."""
DEEPEST = 200
"""Levels of its syntax tree; each term of a sum is one."""
_LARGEST_DECIMAL_EXPONENT = 1000
_SPELLING = (*standard_transformations, implicit_multiplication_application)
_MARKS = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_.,+-*/^!()[] \t\r\n")
_DECIMAL_EXPONENT = re.compile(r"[eE]([-+]?[0-9_]+)$")

_CONSTANTS: Mapping[str, sympy.Expr] = {"pi": sympy.pi, "oo": sympy.oo, "I": sympy.I}
_FUNCTIONS: Mapping[str, Callable[[sympy.Expr], sympy.Expr]] = {
    "sqrt": sympy.sqrt,
    "ln": sympy.ln,
    "csc": sympy.csc,
    "factorial": lambda argument: sympy.factorial(check_factorial(argument)),
    "factorial2": lambda argument: sympy.factorial2(check_factorial(argument)),
}
_SIGNS: Mapping[type[ast.unaryop], Callable[[sympy.Expr], sympy.Expr]] = {
    ast.UAdd: lambda argument: argument,
    ast.USub: lambda argument: -argument,
}
_OPERATIONS: Mapping[type[ast.operator], Callable[[Any, Any], sympy.Expr]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: left / right,
    ast.Pow: lambda left, right: left ** check_power(left, right),
}


def read_formula(text: str) -> sympy.Expr:
    """The expression that a formula denotes: ``2x^2 + sqrt(3)/4 + 5!``.

    A letter is a symbol, letters side by side are a product; ``pi``, ``oo``, ``sqrt``, ``ln`` and ``csc`` are
    known by name.

    Raises:
        FormulaError: it is anything else, too long, too deep, or holds a number that would be too large.
    """
    if len(text) > LONGEST:
        raise FormulaError(f"{len(text)} characters (wanted: at most {LONGEST})")
    if strange := {c for c in text if c not in _MARKS and (c.isascii() or not c.isalpha())}:
        raise FormulaError(f"{sorted(strange)!r:.80}: in no formula")
    return check_degrees(build_formula(_tree(text.replace("^", "**"))))


def _tree(text: str) -> ast.expr:
    try:
        # In brackets, so that it is one expression, over however many lines it goes.
        line = stringify_expr(f"({text})", {}, dict(_NAMES), _SPELLING)
        tree = ast.parse(line, mode="eval").body
    except Exception as error:  # its tokens make sympy's rules raise whatever indexing a list raises
        raise FormulaError(f"{text!r:.80}: {type(error).__name__}") from error
    if _depth(tree) > DEEPEST:
        raise FormulaError(f"{text!r:.80}: deeper than {DEEPEST} levels")
    return tree


def _depth(tree: ast.AST) -> int:
    depth, level = 0, [tree]
    while level:
        depth += 1
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return depth


def build_formula(node: ast.expr) -> sympy.Expr:
    """The expression of a syntax tree that sympy's rules of spelling have made.

    Raises:
        FormulaError: it holds what has no meaning in a formula, whatever it means in Python.
    """
    match node:
        case ast.BinOp(left, operation, right) if type(operation) in _OPERATIONS:
            return _OPERATIONS[type(operation)](build_formula(left), build_formula(right))
        case ast.UnaryOp(sign, argument) if type(sign) in _SIGNS:
            return _SIGNS[type(sign)](build_formula(argument))
        case ast.Name(name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Call(ast.Name(name), arguments, []) if name in _LITERALS:
            return _LITERALS[name](*(_constant(argument) for argument in arguments))
        case ast.Call(ast.Name(name), [argument], []) if name in _FUNCTIONS:
            return _FUNCTIONS[name](build_formula(argument))
    raise FormulaError(f"{ast.unparse(node)!r:.80}: no formula")


def _constant(node: ast.expr) -> int | str:
    match node:
        case ast.Constant(int() | str() as value):
            return value
        case ast.Call(ast.Name("Integer"), [ast.Constant(int() as value)], []):
            return value  # of a repeating decimal
    raise FormulaError(f"{ast.unparse(node)!r:.80}: no number")


def _integer(value: int | str) -> sympy.Expr:
    return sympy.Integer(int(value))


def _decimal(text: int | str) -> sympy.Expr:
    exponent = _DECIMAL_EXPONENT.search(str(text))
    if exponent and abs(int(exponent[1])) > _LARGEST_DECIMAL_EXPONENT:
        raise FormulaError(f"{text!r:.80}: exponent beyond {_LARGEST_DECIMAL_EXPONENT}")
    return sympy.Float(str(text))


_LITERALS: Mapping[str, Callable[..., sympy.Expr]] = {
    "Symbol": lambda name: sympy.Symbol(str(name)),
    "Integer": _integer,
    "Number": _integer,
    "Float": _decimal,
    "Rational": lambda above, below: sympy.Rational(int(above), int(below)),
}
# What sympy's rules of spelling look names up in, to tell functions from factors.
_NAMES = {
    **dict.fromkeys((*_LITERALS, "Function"), sympy.Symbol),
    **dict.fromkeys(_FUNCTIONS, sympy.sqrt),
    **_CONSTANTS,
}
