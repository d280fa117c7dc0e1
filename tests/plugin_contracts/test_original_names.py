"""What plug-ins written for the original import is there, and takes every call that the original's takes.

``original_names.tsv`` has the public names that the original's examples and tests import from slime, and the
hooks' side of its module map, with the names of their parameters; ``...`` stands for any default.
"""

import ast
import csv
import importlib
import inspect
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tests.each import hold_each
from tests.plugin_contracts.known_gaps import GAPS

with Path(__file__).with_name("original_names.tsv").open(newline="") as lines:
    ROWS = [(row["module"], row["name"], row["parameters"]) for row in csv.DictReader(lines, delimiter="\t")]


def calls_of(parameters: str) -> list[tuple[list[None], dict[str, None]]]:
    """The least and the most that may be passed, by position and by keyword."""
    (definition,) = ast.parse(f"def f{parameters}: ...").body
    assert isinstance(definition, ast.FunctionDef)
    arguments = definition.args
    names = [argument.arg for argument in arguments.args]
    least = names[: len(names) - len(arguments.defaults)]
    only = [argument.arg for argument in arguments.kwonlyargs]
    needed = [name for name, default in zip(only, arguments.kw_defaults, strict=True) if default is None]
    by_name = ([], dict.fromkeys(names + only))
    if arguments.vararg:
        by_name = ([None] * len(names), dict.fromkeys(only))
    return [
        ([None] * len(least), dict.fromkeys(needed)),
        ([None] * len(names), dict.fromkeys(only)),
        by_name,
    ]


def why_not(module: str, name: str, parameters: str) -> str | None:
    """What a plug-in that imports and calls this would run into."""
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        return f"no module: {error}"
    for part in name.split(".") if name else []:
        if not hasattr(found, part):
            try:
                found = importlib.import_module(f"{module}.{part}")
                continue
            except ImportError:
                return f"{module} has no {name}"
        found = getattr(found, part)
    for positional, keywords in calls_of(parameters) if parameters else []:
        try:
            inspect.signature(found).bind(*positional, **keywords)
        except TypeError as error:
            return f"{inspect.signature(found)} for {parameters}: {error}"
    return None


def pattern_of(row: tuple[str, str, str]) -> str | None:
    return next((pattern for pattern in GAPS if fnmatchcase(f"{row[0]}:{row[1]}", pattern)), None)


SETTLED = [row for row in ROWS if pattern_of(row) is None]


def test_every_name_is_there_and_takes_the_original_s_calls():
    def check(row):
        reason = why_not(*row)
        assert reason is None, reason

    hold_each(SETTLED, check, name=lambda row: f"{row[0]}:{row[1]}", least=150)


def test_every_known_gap_is_still_one():
    """Each name that it matches is missing or narrower."""

    def check(pattern):
        rows = [row for row in ROWS if pattern_of(row) == pattern]
        assert rows, "matches no name"
        assert [row for row in rows if why_not(*row) is None] == []

    hold_each(GAPS, check, least=len(GAPS))


def test_what_the_original_s_calls_need_is_found_out():
    assert why_not("slime.utils.misc", "load_function", "(path)") is None
    assert "no module" in str(why_not("slime.nothing", "x", ""))
    assert why_not("slime.utils.misc", "nothing", "") == "slime.utils.misc has no nothing"
    assert "path" in str(why_not("slime.utils.misc", "load_function", "(dotted_path)"))
    assert "missing a required" in str(why_not("slime.utils.misc", "load_function", "(path=...)"))
    assert "too many positional" in str(why_not("slime.utils.misc", "load_function", "(path, more)"))


def test_the_table_is_sorted_and_has_each_name_once():
    names = [row[:2] for row in ROWS]
    assert len(names) > 180 and names == sorted(set(names))
