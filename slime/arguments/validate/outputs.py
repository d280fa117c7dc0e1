"""Places that a run writes to: whether it will be able to."""

import os
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

from slime.arguments.core.flag import option_string

_WIDTH = re.compile(r"(0?[1-9]?[0-9]d?)?", re.ASCII)


def bad_output(args: Namespace, name: str, *, is_directory: bool) -> Iterator[str]:
    """Why nothing can be written where this flag says; nothing without the flag."""
    path = getattr(args, name)
    if path is None:
        return
    if reason := bad_template(path) or _unwritable(Path(path), is_directory):
        yield f"{option_string(name)} {path}: {reason}"


def bad_template(path: str) -> str | None:
    """Why a path that may hold ``{rollout_id}``, also as in ``{rollout_id:05d}``, cannot be filled in."""
    try:
        fields = [field for field in Formatter().parse(path) if field[1] is not None]
    except ValueError as error:
        return f"cannot fill in {error} (wanted: no braces but {{rollout_id}})"
    for _, name, width, conversion in fields:
        if name != "rollout_id" or conversion or not _WIDTH.fullmatch(width or ""):
            shown = name if name != "rollout_id" else f"{name}:{width or conversion}"
            return f"cannot fill in {shown!r} (wanted: no braces but {{rollout_id}})"
    return None


def _unwritable(path: Path, is_directory: bool) -> str | None:
    """Judged by the path itself or its nearest existing parent."""
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    wants_directory = is_directory or existing != path
    if wants_directory != existing.is_dir():
        found, wanted = ("file", "directory") if wants_directory else ("directory", "file")
        return f"{existing} is a {found} (wanted: a {wanted})"
    if not (wants_directory or existing.is_file() or str(existing) == os.devnull):
        return f"{existing} is a device or a pipe (wanted: a file)"
    return None if os.access(existing, os.W_OK) else f"{existing} is not writable"
