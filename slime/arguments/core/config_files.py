"""``--config run.yaml``: flags from files, as words that stand before those of the command line.

    optimizer:            # the headings of --help may be left out
      lr: 4e-4
    run_dir: outputs/mine
    prompt_data: ${env:DATASETS}/rl.jsonl
    trace: ${run_dir}/trace.json

So all that holds for words holds for files: later ones win, and mistakes are told by the same rules, here
with file and line.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from slime.arguments.core.absent_sglang import split_options
from slime.arguments.core.config_entries import Entry, Tree, read_tree
from slime.arguments.core.errors import UsageError
from slime.arguments.core.flag import Flag, without_none
from slime.arguments.core.spelling import nearest
from slime.arguments.core.values import why_no_place
from slime.arguments.registry import documented_groups

CONFIG, RUN_DIR = "--config", "--run-dir"
_FOREIGN_HEADINGS = ("sglang", "router")
_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_OPTION = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*")


@dataclass
class Expanded:
    """A command line with the content of its files.

    Attributes:
        words: as the parser takes them.
        places: ``file:line`` of each option that a file gives and no word of the command line replaces.
        mistakes: what is wrong with the files themselves.
        unknown: names on ``args`` that have no value because of it.
        unread: a file could not be read at all.
    """

    words: list[str]
    places: dict[str, str] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    unread: bool = False

    def placed(self, message: str) -> str:
        """A message about options, with the places of those that come from files before it."""
        named = dict.fromkeys(_OPTION.findall(message.partition(": ")[0]))
        found = [self.places[name] for name in named if name in self.places]
        return f"{', '.join(found)}: {message}" if found else message


def expand(words: Sequence[str]) -> Expanded:
    """The words of a command line, those of its files before them.

    A flag that a word gives is taken from no file, whether it takes one value, many, or none.
    """
    given = [option for option in split_options(words) if option]
    paths = list(_values(given, CONFIG))
    if not paths and not any(_values(given, RUN_DIR)):
        return Expanded(list(words))
    expanded = Expanded([])
    entries = _entries(paths, expanded)
    typed = {_dest_of(option[0].partition("=")[0]) for option in given}
    entries = {dest: entry for dest, entry in entries.items() if dest not in typed}
    run_dir = next(iter([*list(_values(given, RUN_DIR))[::-1], *_plain(entries.get("run_dir"))]), None)
    for dest, entry in entries.items():
        spec = _specs()[0].get(dest)
        option = spec.names[0] if spec else _option(dest)
        expanded.places[option] = entry.place
        try:
            expanded.words += _words_of(spec, option, _resolved(entry, run_dir))
        except ValueError as error:
            expanded.mistakes.append(f"{option}: {error}")
            expanded.unknown.append(dest)
    # A directory that cannot be is one mistake, not three.
    if run_dir is not None and why_no_place(run_dir) is None:
        typed |= entries.keys()
        expanded.words += [f"--{name}={run_dir}" for name in ("save", "load") if name not in typed]
    expanded.words += words
    return expanded


def required_flags() -> set[str]:
    """The flags without which no run starts."""
    return {name for name, spec in _specs()[1].items() if spec.required}


def _values(options: Iterable[Sequence[str]], name: str) -> Iterable[str]:
    for option in options:
        head, _, value = option[0].partition("=")
        if head == name:
            yield from [value] if "=" in option[0] else option[1:2]


def _plain(entry: Entry | None) -> list[str]:
    return [] if entry is None else [_fill_in(str(entry.value), None)]


def _entries(paths: Sequence[str], expanded: Expanded) -> dict[str, Entry]:
    """What the files say, by dest; later files win."""
    found: dict[str, Entry] = {}
    mistakes = expanded.mistakes
    for path in paths:
        try:
            tree = read_tree(path, f"{CONFIG} {path}")
        except UsageError as error:
            mistakes += error.messages
            expanded.unread = True
            continue
        mistakes += tree.mistakes
        found |= {_dest_of(entry.key): entry for entry in _flat(tree, mistakes)}
    return found


def _flat(tree: Tree, mistakes: list[str]) -> Iterable[Entry]:
    """The entries without their headings."""
    for entry in tree.entries:
        if not isinstance(entry.value, Tree):
            yield entry
        elif _takes_mapping(entry.key):
            yield replace(entry, value=entry.value.plain())
        elif entry.key in _headings():
            mistakes += entry.value.mistakes
            yield from _flat(entry.value, mistakes)
        else:
            near = nearest(entry.key, _headings())
            wanted = f"did you mean {near}?" if near else "wanted: a heading of --help, or a flag"
            mistakes.append(f"{entry.place}: {entry.key} is not a heading ({wanted})")


@cache
def _headings() -> frozenset[str]:
    return frozenset([*_FOREIGN_HEADINGS, *(group.title for group in documented_groups())])


@cache
def _specs() -> tuple[dict[str, Flag], dict[str, Flag]]:
    """Our flags by dest and by option."""
    specs = [spec for group in documented_groups() for spec in group.flags]
    return {spec.dest: spec for spec in specs}, {name: spec for spec in specs for name in spec.names}


def _spec_of(key: str) -> Flag | None:
    by_dest, by_name = _specs()
    return by_dest.get(key.replace("-", "_")) or by_name.get(_option(key))


def _option(key: str) -> str:
    return "--" + key.lstrip("-").replace("_", "-")


def _dest_of(key: str) -> str:
    """The name on ``args`` of a key of a file or an option of the command line."""
    spec = _specs()[1].get(_option(key)) or _specs()[1].get(_option(key).replace("--no-", "--", 1))
    return spec.dest if spec else key.lstrip("-").replace("-", "_")


def _takes_mapping(key: str) -> bool:
    spec = _spec_of(key)
    return spec is not None and (getattr(without_none(spec.type)[0], "__origin__", None) or spec.type) is dict


def _resolved(entry: Entry, run_dir: str | None) -> Any:
    """The value with its references filled in; one that is nothing else may become a number.

    Raises:
        ValueError: a reference leads nowhere.
    """
    fill: Callable[[str], str] = lambda text: _fill_in(text, run_dir)
    return _each(entry.value, fill)


def _each(value: Any, fill: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return fill(value)
    if isinstance(value, list):
        return [_each(item, fill) for item in value]
    return {name: _each(item, fill) for name, item in value.items()} if isinstance(value, dict) else value


def _fill_in(text: str, run_dir: str | None) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1].strip()
        if name == "run_dir":
            if run_dir is None:
                raise ValueError("${run_dir}: not known (wanted: run_dir in the file, or --run-dir)")
            return run_dir
        kind, _, variable = name.partition(":")
        if kind != "env" or not variable:
            raise ValueError(f"{match[0]}: unknown (wanted: ${{env:NAME}} or ${{run_dir}})")
        if variable not in os.environ:
            raise ValueError(f"{match[0]}: the environment has no {variable}")
        return os.environ[variable]

    return _REFERENCE.sub(value, text)


def _words_of(spec: Flag | None, option: str, value: Any) -> list[str]:
    """The words that set a flag to a value.

    Raises:
        ValueError: no words do.
    """
    if spec is not None and value == spec.default and type(value) is type(spec.default):
        return []
    if value is None:
        raise ValueError("without a value (wanted: one, or the line left out)")
    if spec is not None and (without_none(spec.type)[0] is bool or spec.const is not None):
        return _switch(spec, option, value)
    if isinstance(value, bool):
        if spec is not None:
            raise ValueError(f"is {str(value).lower()} (wanted: {spec.help})")
        return [option] if value else []
    if isinstance(value, list):
        return _list(spec, option, value)
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    return [f"{option}={text}"]


def _switch(spec: Flag, option: str, value: Any) -> list[str]:
    if spec.const is not None and value == spec.const:
        return [option]
    if not isinstance(value, bool):
        raise ValueError(f"is {value!r} (wanted: true or false)")
    if without_none(spec.type)[1] and spec.const is None:
        return [option if value else f"--no-{option.removeprefix('--')}"]
    return [option]  # it is not the default


def _list(spec: Flag | None, option: str, values: list[Any]) -> list[str]:
    if not values:
        raise ValueError("is empty (wanted: values, or the line left out)")
    texts = [json.dumps(value) if isinstance(value, dict | list) else str(value) for value in values]
    if spec is not None and spec.append:
        return [f"{option}={text}" for text in texts]
    return [option, *texts]
