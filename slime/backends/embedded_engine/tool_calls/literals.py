"""Python literals that a model wrote, read with a list of what may be in them."""

import ast
import warnings
from typing import Any

from slime.backends.embedded_engine.tool_calls.base import Malformed

_MAX_CHARACTERS = 1_000_000


def parsed(text: str) -> ast.expr:
    """The syntax tree of an expression; nothing of it is run.

    Raises:
        Malformed: it is no expression.
    """
    if len(text) > _MAX_CHARACTERS:
        raise Malformed(f"{len(text)} characters (wanted: at most {_MAX_CHARACTERS})")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise Malformed(str(error)) from error


def literal(text: str) -> Any:
    """The value of a literal: numbers, strings, booleans, None, lists, tuples and dictionaries of them.

    Raises:
        Malformed: it is something else.
    """
    return value_of(parsed(text))


def value_of(node: ast.expr) -> Any:
    """The value of a syntax tree. Raises Malformed as ``literal`` does."""
    try:
        return _value(node)
    except RecursionError as error:
        raise Malformed("nested too deeply") from error


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
    raise Malformed(f"{type(node).__name__} is not a literal")


def _key(node: ast.expr | None) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    raise Malformed("a key is not a literal")
