"""Which names of ``args`` a file reads and writes, by its syntax tree."""

import ast
from collections.abc import Iterator
from pathlib import Path

_HOLDERS = ("args", "_args")
_BY_STRING = {"getattr": ast.Load, "hasattr": ast.Load, "setattr": ast.Store, "delattr": ast.Del}


def is_args(node: ast.expr) -> bool:
    """``args``, or what an object holds under that name, as in ``self._args``."""
    if isinstance(node, ast.Attribute):
        return node.attr in _HOLDERS
    return isinstance(node, ast.Name) and node.id == "args"


def uses(path: Path) -> Iterator[tuple[str, int, type[ast.expr_context]]]:
    """(name, line, how) of every ``args.NAME`` and of ``getattr(args, "NAME")`` and its kin.

    A name that is computed is ``*``.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and is_args(node.value):
            yield node.attr, node.lineno, type(node.ctx)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_STRING:
            target, name, *_ = [*node.args, None]
            if target is not None and is_args(target):
                constant = isinstance(name, ast.Constant)
                yield (str(name.value) if constant else "*"), node.lineno, _BY_STRING[node.func.id]


def read_names(path: Path) -> dict[str, int]:
    """Names that a file reads, with a line of each."""
    return {name: line for name, line, how in uses(path) if how is ast.Load and name != "*"}


def written_names(path: Path) -> dict[str, int]:
    """Names that a file sets or deletes, with a line of each."""
    return {name: line for name, line, how in uses(path) if how is not ast.Load}
