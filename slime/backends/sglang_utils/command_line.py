"""Makes a command line of values, the inverse of ``argparse``.

Servers are started as commands. Their own parsers say which options this version of them has and how
each is written, so nothing here lists options and a new release brings its own along.
"""

import argparse
import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

logger = logging.getLogger(__name__)


def parser_actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The parser's options by ``dest``; of aliases with one dest, the first."""
    actions: dict[str, argparse.Action] = {}
    for action in parser._actions:
        if action.option_strings and action.default is not argparse.SUPPRESS:
            actions.setdefault(action.dest, action)
    return actions


def command_line(parser: argparse.ArgumentParser, values: Mapping[str, Any]) -> list[str]:
    """Arguments that make ``parser`` produce ``values``; defaults and None are left out.

    Values the parser has no option for are dropped with a log line: they belong to other versions.
    """
    actions = parser_actions(parser)
    unknown = sorted(set(values) - set(actions))
    if unknown:
        logger.info("%s has no option for %s: left out", parser.prog, ", ".join(unknown))
    argv: list[str] = []
    for dest, action in actions.items():
        value = values.get(dest)
        if value is not None and value != action.default:
            argv += _written(action, value)
    return argv


def _written(action: argparse.Action, value: Any) -> Iterator[str]:
    long_names = [name for name in action.option_strings if name.startswith("--")]
    name = long_names[0]
    if isinstance(action, argparse.BooleanOptionalAction):
        yield name if value else "--no-" + name.removeprefix("--")
    elif action.nargs == 0:
        yield name
    elif isinstance(action, argparse._AppendAction):
        for item in value:
            yield from [name, *map(_text, item)] if isinstance(item, list | tuple) else [f"{name}={item}"]
    elif isinstance(value, list | tuple) and action.nargs is not None:
        yield from [name, *map(_text, value)]
    else:
        yield f"{name}={_text(value)}"


def _text(value: Any) -> str:
    """A value as its option's type reads it."""
    structured = isinstance(value, dict | list | tuple) or value is True or value is False
    return json.dumps(value) if structured else str(value)
