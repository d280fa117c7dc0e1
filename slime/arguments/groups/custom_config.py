"""``--custom-config-path``: a YAML file whose keys become attributes of ``args``.

They are set right after parsing, so that everything derived from a flag follows them too, and they go
through the same checks. A key that is not a flag is for the user's own hooks and may hold anything.
"""

import argparse
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slime.arguments.core.errors import UsageError
from slime.arguments.core.flag import Flag, place_flag
from slime.arguments.core.group import ConfigGroup
from slime.arguments.core.spelling import misspelt, nearest
from slime.arguments.core.values import describe, typed, why_no_file, why_no_place
from slime.arguments.core.yaml_file import load_plain_yaml, place_in


@dataclass(frozen=True)
class CustomConfigArgs:
    """Flags that come from a file."""

    custom_config_path: str | None = place_flag(
        "YAML file whose keys are set on args before anything is derived"
    )


def apply_custom_config(
    args: Namespace,
    specs: Mapping[str, Flag],
    actions: Sequence[argparse.Action],
    not_for_users: Collection[str] = (),
) -> list[str]:
    """Sets the keys of the file that ``args.custom_config_path`` names; they win over flags.

    Returns:
        A note for each of the user's own keys that is like the name of a flag.

    Args:
        specs: our flags, by dest.
        actions: all options of the parser, those of the servers too.
        not_for_users: names that are worked out from flags or become known in a run.

    Raises:
        UsageError: the file cannot be read, values are not ones that their flags can have, or keys are names
            that are not the user's or misspelt flags.
    """
    path = args.custom_config_path
    if path is None:
        return []
    where = f"--custom-config-path {path}"
    if reason := why_no_place(path) or why_no_file(path):
        raise UsageError(f"{where}: {reason}")
    options = {action.dest: action for action in actions}
    notes, wrong, unknown = list[str](), list[str](), list[str]()
    for key, value in _read(where, Path(path)).items():
        there = f"--custom-config-path {place_in(path, str(key))}"
        if reason := _why_no_key(key, options, not_for_users):
            wrong.append(f"{there}: {reason}")
            continue
        if key not in options and (like := nearest(key, options)):
            notes.append(
                f"{where}: {key} is not a flag and taken for a key of your own (did you mean {like}?)"
            )
        try:
            setattr(args, key, value_of(there, key, value, specs.get(key), options.get(key)))
        except UsageError as error:
            wrong += error.messages
            unknown.append(key)
    if wrong:
        raise UsageError(*wrong, unknown=unknown)
    return notes


def _why_no_key(key: Any, options: Collection[str], not_for_users: Collection[str]) -> str | None:
    if not isinstance(key, str) or not key.isidentifier():
        return f"{key!r} is not a name (wanted: the name of a flag, or one of your own)"
    if key == "custom_config_path":
        return f"{key} cannot name another file (wanted: one file)"
    if key not in options and key in not_for_users:
        return f"{key} follows from other flags (wanted: those, or another name)"
    if key not in options and (meant := misspelt(key, options)):
        return f"{key} is not a flag (did you mean {meant}? else choose another name)"
    return None


def _read(where: str, path: Path) -> dict[Any, Any]:
    try:
        values = load_plain_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{where}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, or no such date
        raise UsageError(f"{where}: not valid YAML ({error})") from error
    if not isinstance(values, dict):
        raise UsageError(f"{where}: holds {type(values).__name__} (wanted: a mapping)")
    return values


def value_of(where: str, key: str, value: Any, spec: Flag | None, option: argparse.Action | None) -> Any:
    """A value of a YAML file as one that its flag can have; what is not a flag may have any.

    Raises:
        UsageError: it is none.
    """
    if option is None:
        return value
    try:
        return typed(spec, value) if spec else _of_option(option, value)
    except ValueError as error:
        raise UsageError(f"{where}: {describe(key, value, str(error))}") from error


def _of_option(option: argparse.Action, value: Any) -> Any:
    """A value for an option that another package's parser declares."""
    if option.default == argparse.SUPPRESS:
        raise ValueError("wanted nothing: leave it out")
    kind: Any = bool if option.nargs == 0 else option.type or str
    kinds = (int, float) if kind is float else (kind,) if isinstance(kind, type) else ()
    several = option.nargs in ("+", "*")
    for item in value if several and isinstance(value, list) else [value]:
        if item is not None and kinds and type(item) not in kinds:
            raise ValueError(f"wanted list of {kind.__name__}" if several else f"wanted {kind.__name__}")
        if option.choices and item is not None and item not in option.choices:
            raise ValueError(f"wanted {' or '.join(map(str, option.choices))}")
    return value


CONFIG_GROUP = ConfigGroup({"config file": CustomConfigArgs})
