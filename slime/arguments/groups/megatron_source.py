"""Flags read from the source of megatron-core's config dataclasses.

Reading the source instead of importing it gives the docstrings under the fields, which Python drops,
and takes milliseconds where the import takes seconds.
"""

import ast
import importlib.util
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from slime.arguments.core.flag import Flag, option_string, without_none

CONFIG_CLASSES = (
    ("model_parallel_config.py", "ModelParallelConfig"),
    ("transformer/transformer_config.py", "TransformerConfig"),
    ("optimizer/optimizer_config.py", "OptimizerConfig"),
    ("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),
)
_TYPE_NAMES = {name: getattr(typing, name) for name in ("Optional", "Union", "List", "Literal", "Tuple")} | {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "list": list,
}
_SCALARS = (int, float, str, bool)


def megatron_core_dir() -> Path:
    """Directory of the installed ``megatron.core``, found without importing it.

    Raises:
        ModuleNotFoundError: megatron-core is not installed.
    """
    spec = importlib.util.find_spec("megatron.core")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("megatron-core is not installed (pip install megatron-core)")
    return Path(spec.origin).parent


def _evaluate_type(node: ast.expr) -> Any:
    """The type an annotation names, or None when a command line cannot express it."""
    try:
        # The expression comes from an installed package and may only use the names above.
        return eval(ast.unparse(node), {"__builtins__": {}}, dict(_TYPE_NAMES))  # noqa: S307
    except (NameError, AttributeError, TypeError):
        return None


def _expressible(hint: Any) -> bool:
    try:
        base, _ = without_none(hint)
    except TypeError:
        return False
    if base in _SCALARS or typing.get_origin(base) is typing.Literal:
        return True
    return typing.get_origin(base) is list and typing.get_args(base)[0] in _SCALARS


def _literal(node: ast.expr | None) -> Any:
    """Value of a constant expression such as ``2**32``; None for calls and names."""
    if node is None:
        return None
    allowed = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.List, ast.Dict, ast.Load)
    if not all(isinstance(part, allowed) for part in ast.walk(node)):
        return None
    return eval(ast.unparse(node), {"__builtins__": {}})  # noqa: S307 - constants and operators only


def _default_and_names(node: ast.expr | None) -> tuple[Any, tuple[str, ...]]:
    """Default and Megatron-LM's option names from ``x`` or ``field(default=x, metadata=...)``."""
    if not (isinstance(node, ast.Call) and ast.unparse(node.func) in ("field", "dataclasses.field")):
        return _literal(node), ()
    keywords = {keyword.arg: _literal(keyword.value) for keyword in node.keywords}
    metadata = (keywords.get("metadata") or {}).get("argparse_meta", {})
    return metadata.get("default", keywords.get("default")), tuple(metadata.get("arg_names", ()))


def _option_names(dest: str, hint: Any, default: Any) -> tuple[str, ...]:
    if hint is bool and default:
        return (option_string(dest, "no"), option_string(dest, "disable"))
    return (option_string(dest),)


def _config_fields(class_node: ast.ClassDef) -> Iterator[tuple[str, ast.AnnAssign, str]]:
    """(name, assignment, docstring) of every field."""
    body = class_node.body
    for position, node in enumerate(body):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        after = body[position + 1] if position + 1 < len(body) else None
        documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        text = str(after.value.value) if documented else ""  # type: ignore[union-attr]
        yield node.target.id, node, " ".join(text.split())


@cache
def config_flags() -> tuple[Flag, ...]:
    """A flag for each field of megatron-core's configs that a command line can express, once per name."""
    found: dict[str, Flag] = {}
    for file, class_name in CONFIG_CLASSES:
        tree = ast.parse((megatron_core_dir() / file).read_text(encoding="utf-8"))
        class_node = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name)
        for name, node, text in _config_fields(class_node):
            hint = _evaluate_type(node.annotation)
            if name in found or name.startswith("_") or hint is None or not _expressible(hint):
                continue
            default, names = _default_and_names(node.value)
            names = names or _option_names(name, hint, default)
            found[name] = Flag(dest=name, names=names, type=hint, default=default, help=text)
    return tuple(found.values())
