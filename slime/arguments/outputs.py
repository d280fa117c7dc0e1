"""Places that a run writes to: whether it will be able to."""

import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from slime.arguments.flags import option_string


def bad_output(args: Namespace, name: str, *, is_directory: bool) -> Iterator[str]:
    """Why nothing can be written where this flag says; nothing without the flag."""
    path = getattr(args, name)
    if path is None:
        return
    if reason := bad_template(path) or _unwritable(Path(path), is_directory):
        yield f"{option_string(name)} {path}: {reason}"


def bad_template(path: str) -> str | None:
    """Why a path that may hold ``{rollout_id}`` cannot be filled in; None if it can."""
    try:
        path.format(rollout_id=0)
    except (KeyError, IndexError, ValueError) as error:
        return f"cannot fill in {error} (wanted: no braces but {{rollout_id}})"
    return None


def _unwritable(path: Path, is_directory: bool) -> str | None:
    """Judged by the path itself or its nearest existing parent."""
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    wants_directory = is_directory or existing != path
    if wants_directory != existing.is_dir():
        found, wanted = ("file", "directory") if wants_directory else ("directory", "file")
        return f"{existing} is a {found} (wanted: a {wanted})"
    return None if os.access(existing, os.W_OK) else f"{existing} is not writable"
