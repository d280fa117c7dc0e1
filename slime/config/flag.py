"""Fields of config groups that are flags: what the command line has to know of one lies in its metadata."""

import dataclasses
from collections.abc import Sequence
from typing import Any

LEAVE_OUT = "leave it out"


def flag(default: Any = None, *, help: str, names: Sequence[str] = (), **options: Any) -> Any:
    """A dataclass field that is also a flag; ``options`` are fields of `slime.arguments.core.flag.Flag`.

    Without ``names`` the option string is ``--`` and the field name with dashes.
    """
    metadata = {"flag": {"help": help, "names": tuple(names), **options}}
    if options.get("required"):
        return dataclasses.field(metadata=metadata)
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def shape_flag(
    default: Any = dataclasses.MISSING, *, help: str, names: Sequence[str] = (), **options: Any
) -> Any:
    """A field that config.json decides: the flag of it is not given by default, and may not say otherwise.

    Args:
        default: of the field, where a model need not say it.
        type: of the flag, where that is another one than the field's.
    """
    metadata = {"flag": {"help": help, "names": tuple(names), "default": None, **options}}
    return dataclasses.field(default=default, metadata=metadata)


def path_flag(help: str, default: str | None = None, **options: Any) -> Any:
    """A flag that takes the dotted path of a Python object."""
    return flag(default, help=help, dotted_path=True, **options)


def place_flag(help: str, **options: Any) -> Any:
    """A flag that names a file or a directory."""
    return flag(options.pop("default", None), help=help, place=True, **options)


def refused(default: Any = None, *, help: str, wanted: str = LEAVE_OUT, **options: Any) -> Any:
    """A known flag that this version refuses unless it has its default value.

    Without ``wanted`` the tables of foreign options may know the reason.
    """
    return flag(default, help=help, supported=(default,), wanted=wanted, **options)


def foreign_flag(default: Any = dataclasses.MISSING) -> Any:
    """A flag of the router's or SGLang's own parser that code of ours reads.

    Args:
        default: where a plug-in's own ``args`` lack it.
    """
    return dataclasses.field(default=default, metadata={"foreign": True})
