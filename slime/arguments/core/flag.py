"""Flags declared as dataclass fields: one field is one flag, its type decides how it is parsed.

    @dataclass(frozen=True)
    class ClusterArgs:
        actor_num_nodes: int = flag(1, help="trainer nodes")
        colocate: bool = flag(False, help="trainer and engines share GPUs")

``int``, ``float``, ``str`` and ``Literal`` take one value, ``bool`` is a switch that flips its default,
``bool | None`` is a ``--x / --no-x`` pair, ``list[T]`` takes several values, ``dict`` takes a JSON object.
Every number has a range: ``flag(1, above=0, help=...)``, see ``slime.arguments.core.values``.
"""

import argparse
import dataclasses
import json
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from slime.arguments.core.foreign import field_reason
from slime.config.flag import LEAVE_OUT, flag, path_flag, place_flag, refused

__all__ = [
    "Flag",
    "add_flags",
    "argparse_keywords",
    "flag",
    "flags_of",
    "json_object",
    "option_string",
    "path_flag",
    "place_flag",
    "refused",
    "without_none",
]


@dataclass(frozen=True)
class Flag:
    """One command-line flag, whatever declared it.

    Attributes:
        dest: name of the attribute on ``args``.
        names: option strings; the first one is used in messages.
        type: Python type of the value, possibly ``T | None``.
        supported: the values this version can honour, None for all of them.
        wanted: what to use instead of an unsupported value, when that is not one of ``supported``.
        same_as_default: unsupported values that change nothing, as a size of 1; the default replaces them.
        idle_without: the flag without which this one has no effect, whatever its value.
        at_least, above, at_most, below: the range of a number, or of each number of a list.
        also: numbers outside of the range that mean something, as -1 for "all".
        place: the value names a file or a directory.
        append: the option may be repeated, one value each time.
        dotted_path: the value names Python code.
        awaited: what that code returns is awaited if it has to be; otherwise it must be a plain function.
        const: the value of a switch without one of its own, where True or False would mislead.
    """

    dest: str
    names: tuple[str, ...]
    type: Any
    default: Any
    help: str
    choices: tuple[Any, ...] | None = None
    supported: tuple[Any, ...] | None = None
    wanted: str = ""
    same_as_default: tuple[Any, ...] = ()
    idle_without: str = ""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    also: tuple[float, ...] = ()
    place: bool = False
    required: bool = False
    append: bool = False
    dotted_path: bool = False
    awaited: bool = False
    const: Any = None


def option_string(dest: str, prefix: str = "") -> str:
    """``--sglang-dtype`` for dest ``dtype`` and prefix ``sglang``."""
    return "--" + "-".join(part for part in (prefix, dest.replace("_", "-")) if part)


def given(args: argparse.Namespace, *dests: str) -> Iterator[tuple[str, Any]]:
    """Yields (option, value) of those flags that are set: not None, False or empty."""
    for dest in dests:
        value = getattr(args, dest)
        if value not in (None, "", []) and value is not False:
            yield option_string(dest), value


def flags_of(cls: type, prefix: str = "") -> tuple[Flag, ...]:
    """The flags a dataclass declares, in order; a prefix goes before names and dests."""
    return _declared(cls, prefix)


def changed(args: argparse.Namespace, specs: Iterable[Flag]) -> Iterator[tuple[Flag, Any]]:
    """Yields the flags whose value is not the default, with it."""
    for spec in specs:
        if (value := getattr(args, spec.dest)) != spec.default:
            yield spec, value


@cache
def _declared(cls: type, prefix: str) -> tuple[Flag, ...]:
    hints = get_type_hints(cls)
    fields = [field for field in dataclasses.fields(cls) if "flag" in field.metadata]
    return tuple(_of_field(field, hints[field.name], prefix) for field in fields)


def _of_field(field: dataclasses.Field[Any], hint: Any, prefix: str) -> Flag:
    options = dict(field.metadata["flag"])
    names = options.pop("names") or (option_string(field.name),)
    if prefix:
        names = tuple(option_string(name.removeprefix("--"), prefix) for name in names)
    if options.get("wanted") == LEAVE_OUT:
        options["wanted"] = field_reason(names[0])
    default = None if field.default is dataclasses.MISSING else field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    default, hint = options.pop("default", default), options.pop("type", hint)
    dest = f"{prefix}_{field.name}" if prefix else field.name
    if default is None and not options.get("required") and hint is not Any:
        hint = hint | None  # a field that is never None once the values of its group are complete
    return Flag(dest=dest, names=names, type=hint, default=default, **options)


def without_none(hint: Any) -> tuple[Any, bool]:
    """``(T, True)`` for ``T | None``, else ``(hint, False)``."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    members = [member for member in get_args(hint) if member is not type(None)]
    if len(members) != 1:
        raise TypeError(f"a flag cannot be one of several types: {hint}")
    return members[0], True


def json_object(text: str) -> dict[str, Any]:
    """Parser of flags that take a JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"wanted a JSON object, found {text!r} ({error})") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"wanted a JSON object, found {text!r}")
    return value


def _literal_reader(choices: tuple[Any, ...]) -> Callable[[str], Any]:
    by_text = {str(choice): choice for choice in choices}
    return lambda text: by_text.get(text, text)


def _bool_keywords(optional: bool, default: Any) -> dict[str, Any]:
    if optional:
        return {"action": argparse.BooleanOptionalAction}
    return {"action": "store_false" if default else "store_true"}


def argparse_keywords(spec: Flag) -> dict[str, Any]:
    """Keyword arguments of ``parser.add_argument`` for a flag."""
    base, optional = without_none(spec.type)
    if spec.const is not None:
        return {
            "dest": spec.dest,
            "default": None,
            "help": spec.help,
            "action": "store_const",
            "const": spec.const,
        }
    keywords: dict[str, Any] = {
        "dest": spec.dest,
        "default": spec.default,
        "help": spec.help.replace("%", "%%"),
    }
    if base is bool:
        return keywords | _bool_keywords(optional, spec.default)
    if spec.required:
        keywords["required"] = True
    choices = spec.choices
    if get_origin(base) is list:
        keywords["nargs"] = None if spec.append else "+"
        if spec.append:
            keywords["action"] = "append"
        base = get_args(base)[0]
    if get_origin(base) is Literal:
        choices = get_args(base)
        base = _literal_reader(choices)
    if base is dict or get_origin(base) is dict:
        base = json_object
    return keywords | {"type": base, "choices": choices}


def add_flags(parser: Any, specs: Sequence[Flag]) -> None:
    """Adds flags to an ``ArgumentParser`` or a group of one."""
    for spec in specs:
        parser.add_argument(*spec.names, **argparse_keywords(spec))
