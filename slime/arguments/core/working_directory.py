"""Relative paths on a Ray cluster that was there before the run: its processes start in another directory."""

import glob
import os
import re
from argparse import Namespace
from collections.abc import Iterator

from slime.arguments.core.errors import UsageError
from slime.arguments.core.flag import Flag

# Where there is no such file it may be a name, as on the Hugging Face hub or to a data source of the user's.
_IF_THERE = ("hf_checkpoint", "ref_load", "opd_teacher_load", "prompt_data")
_AMONG_WORDS = ("eval_prompt_data",)  # whoever reads the pairs of names and files makes these absolute
_SLICE = re.compile(r"@\[[^\[\]]*\]$")
_WITH_A_MEANING = set("{}*?[]")
"""Characters of a path that is filled in or is a pattern."""


def is_elsewhere() -> bool:
    """Whether the processes of the run have a working directory that is not this one."""
    return bool(os.environ.get("RAY_ADDRESS"))


def make_absolute(args: Namespace, specs: Iterator[Flag]) -> None:
    """Lets every flag that names a place name it for all processes of the run.

    Raises:
        UsageError: see ``absolute``.
    """
    for spec in specs:
        value = getattr(args, spec.dest)
        if spec.place and value is not None and spec.dest not in _AMONG_WORDS:
            make = absolute_if_there if spec.dest in _IF_THERE else absolute
            setattr(args, spec.dest, make(value, spec.names[0]))


def absolute_if_there(path: str, where: str) -> str:
    """Makes paths and patterns of existing files absolute; anything else stays as it is."""
    bare = _SLICE.sub("", path)
    return absolute(path, where) if os.path.exists(bare) or glob.glob(bare, recursive=True) else path


def absolute(path: str, where: str) -> str:
    """The path, from the root if processes start elsewhere; ``where`` names it in an error.

    Raises:
        UsageError: this directory's name would mean something in a path that is filled in or is a pattern.
    """
    if not is_elsewhere() or os.path.isabs(path) or "://" in path:
        return path
    here = os.getcwd()
    if _WITH_A_MEANING & set(here):
        raise UsageError(
            f"{where} {path}: a relative path, which processes of the cluster at RAY_ADDRESS cannot be given "
            f"in {here} (wanted: an absolute path)"
        )
    return os.path.join(here, path)
