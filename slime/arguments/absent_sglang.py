"""SGLang's options where SGLang is not installed: ``--check`` takes them as they are."""

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any


def take_server_options(args: Namespace, unknown: Sequence[str]) -> tuple[list[str], list[str]]:
    """Puts the ``--sglang-*`` words among ``unknown`` into ``args``; nobody here knows their types.

    Returns:
        The other words, and notes for the user.
    """
    rest: list[str] = []
    names: list[str] = []
    for option in _options(unknown):
        if option[0].startswith("--sglang-"):
            name, _, value = option[0].partition("=")
            setattr(
                args, name.removeprefix("--").replace("-", "_"), _value([value] * bool(value) + option[1:])
            )
            names.append(name)
        else:
            rest += option
    if not names:
        return rest, []
    return rest, [f"{', '.join(names)}: not looked at, SGLang is not installed here"]


def _options(words: Sequence[str]) -> Iterator[list[str]]:
    """Each with its values."""
    option: list[str] = []
    for word in words:
        if word.startswith("--") and option:
            yield option
            option = []
        option.append(word)
    if option:
        yield option


def _value(words: Sequence[str]) -> Any:
    values = [_read(word) for word in words]
    if not values:
        return True
    return values[0] if len(values) == 1 else values


def _read(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word
