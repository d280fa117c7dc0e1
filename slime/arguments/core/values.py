"""Whether a value is one that a flag can have: its type, its choices, its range.

What is typed on the command line, what ``--custom-config-path`` sets and what an eval YAML says of a dataset
are all judged here.
"""

import argparse
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from slime.arguments.core.flag import Flag, without_none

LARGEST = 2**63 - 1
"""What torch, Ray and the servers can hold."""
_LONGEST_NAME = 255
_LONGEST_PATH = 4095


def why_bad(spec: Flag, value: Any) -> str | None:
    """Why a flag cannot have a value of its type; None if it can."""
    if value is None or value == spec.default:
        return None
    items = value if isinstance(value, list) else [value]
    return next((reason for item in items if (reason := _why_bad_item(spec, item))), None)


def _why_bad_item(spec: Flag, value: Any) -> str | None:
    if isinstance(value, str):
        return why_no_place(value) if spec.place else _why_no_text(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or value in spec.also:
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return f"wanted a finite number, {range_text(spec)}"
    return None if _in_range(spec, value) else f"wanted {range_text(spec)}"


def _in_range(spec: Flag, value: float) -> bool:
    return (
        (spec.at_least is None or value >= spec.at_least)
        and (spec.above is None or value > spec.above)
        and (spec.at_most is None or value <= spec.at_most)
        and (spec.below is None or value < spec.below)
        and (isinstance(value, float) or abs(value) <= LARGEST)
    )


def has_range(spec: Flag) -> bool:
    """Whether a flag declares one."""
    return any(bound is not None for bound in (spec.at_least, spec.above, spec.at_most, spec.below))


def range_text(spec: Flag) -> str:
    """``0 to 1``, ``more than 0``, ``0 or more, less than 1, or -1``."""
    if spec.at_least is not None and spec.at_most is not None:
        bounds = [f"{spec.at_least} to {spec.at_most}"]
    else:
        bounds = [
            text.format(bound)
            for bound, text in (
                (spec.above, "more than {}"),
                (spec.at_least, "{} or more"),
                (spec.below, "less than {}"),
                (spec.at_most, "at most {}"),
            )
            if bound is not None
        ]
    bounds = bounds or [f"at most {LARGEST}"]
    return ", ".join([*bounds, *(f"or {value}" for value in spec.also)])


def why_no_place(path: str) -> str | None:
    """Why no file can have this name; None if one could."""
    if not path:
        return "is empty (wanted: a path)"
    if "\0" in path:
        return "holds a NUL character (wanted: a path)"
    if path == "~" or path.startswith("~/"):
        return "begins with ~, which the shell replaces only where a word begins (wanted: $HOME)"
    parts = os.fsencode(path).split(b"/")
    if len(os.fsencode(path)) > _LONGEST_PATH or any(len(part) > _LONGEST_NAME for part in parts):
        return f"is too long (wanted: at most {_LONGEST_NAME} bytes between slashes, {_LONGEST_PATH} in all)"
    return None


def why_no_file(path: str | Path) -> str | None:
    """Why there is nothing to read at this path; None if there is.

    A pipe or a device may never end.
    """
    if Path(path).is_file():
        return None
    return "is not a file" if Path(path).exists() else "no such file"


def _why_no_text(text: str) -> str | None:
    return "holds a NUL character (wanted: text without it)" if "\0" in text else None


def typed(spec: Flag, value: Any) -> Any:
    """A value of a YAML file as one of the flag's type.

    Raises:
        ValueError: it is of another type or no choice, or outside of the range; the text says what is wanted.
    """
    wanted, optional = without_none(spec.type)
    if value is None and (optional or spec.required):
        return None  # a required flag without a value is missing, which its parser reports
    value = _typed(wanted, spec.choices, value)
    if reason := why_bad(spec, value):
        raise ValueError(reason)
    return value


def _typed(wanted: Any, choices: tuple[Any, ...] | None, value: Any) -> Any:
    kind = get_origin(wanted) or wanted
    choices = get_args(wanted) if kind is Literal else choices
    if kind is float and type(value) is int and abs(value) <= LARGEST:
        value = float(value)
    if kind in (int, float, str, bool, list, dict) and type(value) is not kind:
        raise ValueError(f"wanted {type_text(wanted)}")
    if kind is list:
        return [_typed(get_args(wanted)[0], choices, item) for item in value]
    if kind is dict and not all(isinstance(key, str) for key in value):
        raise ValueError(f"wanted {type_text(wanted)}")
    if choices and value not in choices:
        raise ValueError(f"wanted {' or '.join(map(str, choices))}")
    return value


def type_text(wanted: Any) -> str:
    """``int``, ``list of str``, ``mapping``."""
    kind = get_origin(wanted) or wanted
    if kind is list:
        return f"list of {type_text(get_args(wanted)[0])}"
    if kind is dict:
        return "mapping"
    return " or ".join(map(str, get_args(wanted))) if kind is Literal else str(kind.__name__)


def describe(name: str, value: Any, reason: str) -> str:
    """``top_p is 2 (wanted: 0 to 1)``, from what ``typed`` says."""
    if reason.startswith("wanted "):
        return f"{name} is {value!r:.200} (wanted: {reason.removeprefix('wanted ')})"
    return f"{name} {reason}"


def bad_values(args: Any, specs: Iterable[Flag]) -> Iterator[str]:
    """The flags among these whose value is out of range, one line each."""
    for spec in specs:
        value = getattr(args, spec.dest)
        if reason := why_bad(spec, value):
            shown = " ".join(map(str, value)) if isinstance(value, list) else value
            yield f"{spec.names[0]} {shown}: {reason}"


def bad_options(args: Any, actions: Iterable[argparse.Action]) -> Iterator[str]:
    """The options of foreign parsers whose number no server can mean, one line each.

    Their ranges are not declared: what is refused is not finite, too large or, for the router, negative.
    """
    for action in actions:
        value = getattr(args, action.dest, None)
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, bool) or not isinstance(item, int | float) or value == action.default:
                continue
            lowest = 0 if action.dest.startswith("router_") else -LARGEST
            if not (math.isfinite(item) and lowest <= item <= LARGEST):
                wanted = "a finite number" if lowest else "a finite number, 0 or more"
                yield f"{action.option_strings[0]} {item}: wanted {wanted}"
