"""SGLang's options where SGLang is not installed: ``--check`` takes them as they are."""

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from slime.arguments.core.errors import UsageError

_OTHER_NAMES = {"pipeline_parallel_size": "pp_size"}


def take_server_options(args: Namespace, unknown: Sequence[str]) -> tuple[list[str], list[str]]:
    """Puts the ``--sglang-*`` words among ``unknown`` into ``args``; nobody here knows their types.

    Returns:
        The other words, and notes for the user.

    Raises:
        UsageError: one that is read here has a value that it cannot have.
    """
    rest: list[str] = []
    names: list[str] = []
    for option in split_options(unknown):
        if option[0].startswith(("--sglang-", "--no-sglang-")):
            name, _, text = option[0].partition("=")
            off = name.startswith(("--no-sglang-", "--sglang-no-"))
            value = False if off else _value([text] * bool(text) + option[1:])
            key = name.split("sglang-", 1)[1].removeprefix("no-" if off else "").replace("-", "_")
            key = _OTHER_NAMES.get(key, key)
            if wanted := why_no_number(key, value):
                raise UsageError(f"{name} {value}: {wanted}")
            setattr(args, f"sglang_{key}", value)
            names.append(name)
        else:
            rest += option
    if not names:
        return rest, []
    return rest, [f"{', '.join(names)}: not looked at, SGLang is not installed here"]


def why_no_number(key: str, value: Any) -> str | None:
    """What is wanted of a value, where it is one that the memory of engines follows from."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if key == "pp_size" and not (type(value) is int and value > 0):
        return "wanted a number of stages, 1 or more"
    if key == "mem_fraction_static" and not (number and 0 < value < 1):
        return "wanted a number above 0, below 1"
    return None


def bad_numbers(args: Namespace) -> Iterator[str]:
    """Yields the options of ``--sglang-config`` whose values are not the numbers that they should be."""
    for model in args.served_models:
        for number, group in enumerate(model.server_groups, 1):
            for key, value in group.overrides.items():
                if wanted := why_no_number(key, value):
                    where = f"--sglang-config {args.sglang_config}: model {model.name}: group {number}"
                    yield f"{where}: overrides: {key} is {value!r:.80} ({wanted})"


def split_options(words: Sequence[str]) -> Iterator[list[str]]:
    """Each option of a command line with its values."""
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
