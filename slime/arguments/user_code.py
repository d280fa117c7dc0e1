"""Dotted paths of the user's code: whether what they name can be called."""

from argparse import Namespace
from collections.abc import Iterable, Iterator

from slime.arguments.flags import Flag
from slime.arguments.user_imports import missing_imports
from slime.utils.misc import load_function


def unusable_code(args: Namespace, specs: Iterable[Flag]) -> Iterator[str]:
    """The dotted paths among these flags that name nothing to call."""
    for spec in specs:
        if not spec.dotted_path:
            continue
        value = getattr(args, spec.dest)
        for path in value if isinstance(value, list) else [value]:
            if path is not None and (reason := why_unusable(path)):
                yield f"{spec.names[0]} {path}: {reason}"


def why_unusable(path: str) -> str | None:
    """Why the object at a dotted path cannot be called, or would fail when it is; None if it can."""
    try:
        found = load_function(path)
    except Exception as error:  # importing a user's module runs the user's code, which may raise anything
        text = str(error).removeprefix(f"dotted path {path!r}: ")
        return text if isinstance(error, ValueError) else f"its import fails: {type(error).__name__}: {text}"
    if not callable(found):
        return f"is {type(found).__name__} (wanted: something to call)"
    return "; ".join(missing_imports(path.rpartition(".")[0])) or None
