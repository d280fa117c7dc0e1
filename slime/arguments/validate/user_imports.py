"""Names of ours that functions of the user's code import and that do not exist.

An import at the top of a module fails as soon as the module is loaded. One inside a function fails when that
is called: in the first train step, say. So the source is read, without running any of it. What a plug-in
imports from elsewhere is its own affair, and an import whose failure it catches is no fault.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]
_TOLERANT = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
Import = ast.Import | ast.ImportFrom


def missing_imports(module_name: str) -> list[str]:
    """What the functions of a loaded module, and of the modules of its package that it uses, cannot import.

    Returns:
        Lines like ``plug.py:12 imports slime.utils.nothing, which does not exist``.
    """
    lines: list[str] = []
    waiting, seen = [module_name], {module_name}
    while waiting and _top(module_name) != "slime":
        name = waiting.pop()
        missing, named = _read_module(name)
        lines += missing
        own = {other for other in named if other in sys.modules} - seen
        waiting += sorted(own)
        seen |= own
    return lines


def _read_module(name: str) -> tuple[list[str], set[str]]:
    """Lines for what the functions of a module cannot import, and what it names of its own package."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if file is None or not file.endswith(".py"):
        return [], set()
    try:
        package = getattr(module, "__package__", None) or ""
        return _read_source(name, package, file, Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return [], set()


@cache
def _read_source(name: str, package: str, file: str, source: bytes) -> tuple[list[str], set[str]]:
    tree = ast.parse(source)
    missing = [
        f"{Path(file).name}:{node.lineno} imports {what}"
        for node in _late_imports(tree)
        for what in _unresolved(node)
    ]
    return missing, set(_own_modules(tree, name, package))


def _top(name: str) -> str:
    return name.partition(".")[0]


def _own_modules(tree: ast.Module, name: str, package: str) -> Iterator[str]:
    """What a module names of its own top-level package, modules and other things."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _top(alias.name) == _top(name))
        elif isinstance(node, ast.ImportFrom):
            try:
                base = resolve_name("." * node.level + (node.module or ""), package)
            except ImportError:
                continue
            if _top(base) == _top(name):
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)


def _late_imports(node: ast.AST, in_function: bool = False, caught: bool = False) -> Iterator[Import]:
    """Imports that run when a function is called, and whose failure nobody catches."""
    for child in ast.iter_child_nodes(node):
        tolerant = caught or (isinstance(node, ast.Try) and child in node.body and _catches_imports(node))
        if isinstance(child, ast.Import | ast.ImportFrom):
            if in_function and not tolerant:
                yield child
            continue
        inside = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(child, ast.With | ast.AsyncWith):
            tolerant = tolerant or any(_mentions_import_error(item) for item in child.items)
        yield from _late_imports(child, inside, tolerant)


def _catches_imports(node: ast.Try) -> bool:
    return any(handler.type is None or _mentions_import_error(handler.type) for handler in node.handlers)


def _mentions_import_error(node: ast.AST) -> bool:
    return any(isinstance(name, ast.Name) and name.id in _TOLERANT for name in ast.walk(node))


def _unresolved(node: Import) -> Iterator[str]:
    """What an import asks of slime in vain."""
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    else:
        modules = [node.module] if node.module and not node.level else []
    for module in modules:
        if _top(module) != "slime":
            continue
        if _file_of(module) is None:
            yield f"{module}, which does not exist"
        elif isinstance(node, ast.ImportFrom):
            names = _names_of(module)
            for alias in node.names:
                known = names is None or alias.name in names
                if not known and _file_of(f"{module}.{alias.name}") is None:
                    yield f"{alias.name} from {module}, which has no such name"


def _file_of(module: str) -> Path | None:
    base = _PACKAGE.joinpath(*module.split(".")[1:])
    candidates = (base / "__init__.py", base.with_name(base.name + ".py"))
    return next((path for path in candidates if path.is_file()), None)


@cache
def _names_of(module: str) -> set[str] | None:
    """What a module of ours binds at its top; None if that cannot be told."""
    path = _file_of(module)
    assert path is not None
    names: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(path.read_bytes())]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            else:
                waiting.append(node)
    return None if names & {"*", "__getattr__"} else names
