"""Which names of ``args`` a file reads and writes, by its syntax tree."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

_HOLDERS = ("args", "_args", "flat")
_CHANGES = ("update", "setdefault", "pop", "popitem", "clear")
_BY_STRING = {"getattr": ast.Load, "hasattr": ast.Load, "setattr": ast.Store, "delattr": ast.Del}


def is_args(node: ast.expr) -> bool:
    """``args``, or what an object holds under that name, as in ``self._args``."""
    if isinstance(node, ast.Attribute):
        return node.attr in _HOLDERS
    return isinstance(node, ast.Name) and node.id == "args"


def uses(path: Path) -> Iterator[tuple[str, int, type[ast.expr_context]]]:
    """(name, line, how) of every ``args.NAME`` and of ``getattr(args, "NAME")`` and its kin.

    A name that is computed is ``*``, and so is what a change of ``vars(args)`` writes.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and is_args(node.value):
            yield node.attr, node.lineno, type(node.ctx)
        if _changes_vars(node):
            yield "*", node.lineno, ast.Store
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_STRING:
            target, name, *_ = [*node.args, None]
            if target is not None and is_args(target):
                constant = isinstance(name, ast.Constant)
                yield (str(name.value) if constant else "*"), node.lineno, _BY_STRING[node.func.id]


def _changes_vars(node: ast.AST) -> TypeGuard[ast.expr]:
    """Whether ``vars(args)`` is given, or loses, an item there."""
    if isinstance(node, ast.Subscript):
        return not isinstance(node.ctx, ast.Load) and _is_vars(node.value)
    return isinstance(node, ast.Attribute) and node.attr in _CHANGES and _is_vars(node.value)


def _is_vars(node: ast.expr) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
        return False
    return node.func.id == "vars" and is_args(node.args[0])


def read_names(path: Path) -> dict[str, int]:
    """Names that a file reads, with a line of each."""
    return {name: line for name, line, how in uses(path) if how is ast.Load and name != "*"}


def written_names(path: Path) -> dict[str, int]:
    """Names that a file sets or deletes, with a line of each."""
    return {name: line for name, line, how in uses(path) if how is not ast.Load}
