"""Options of Megatron-LM and of earlier versions of slime that no dataclass declares, from two tables.

A launch script that carries one is told what becomes of it: it is accepted with a note where it could change
nothing here, and else refused with what to write instead. ``args`` has no attribute for any of them.
"""

import argparse
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from slime.arguments.core.errors import UsageError
from slime.config.flag import LEAVE_OUT

TABLES = ("megatron_lm_flags.txt", "earlier_flags.txt")
_GIVEN = "foreign_options"
_WORDS: dict[str, int | str] = {"switch": 0, "value": 1, "values": "*"}


@dataclass(frozen=True)
class ForeignFlag:
    """One option of a table.

    Attributes:
        names: its option strings.
        words: how many values follow, as argparse's ``nargs``; None in a pattern for megatron-core's fields.
        default: the value that says what is so anyway; empty if there is none.
        refused: whether another value is refused.
        reason: why it has no effect, or what to write instead.
    """

    names: tuple[str, ...]
    words: int | str | None
    default: str
    refused: bool
    reason: str


@cache
def foreign_flags() -> tuple[ForeignFlag, ...]:
    """Every option of the tables."""
    return tuple(entry for entry in _entries() if entry.words is not None)


@cache
def _entries() -> tuple[ForeignFlag, ...]:
    return tuple(entry for table in TABLES for entry in _read(Path(__file__).with_name(table)))


def _read(path: Path) -> Iterator[ForeignFlag]:
    kind = reason = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            kind, _, reason = line.removeprefix("[").partition("] ")
        elif line.startswith("--"):
            names, *rest = line.split()
            words = _WORDS[rest[0]] if rest else None
            default = " ".join(rest[1:])
            yield ForeignFlag(tuple(names.split(",")), words, default, kind != "unused", reason)


def field_reason(name: str) -> str:
    """What to write instead of an option that is declared and not honoured."""
    fields = (entry for entry in _entries() if entry.words is None)
    return next((entry.reason for entry in fields if fnmatchcase(name, entry.names[0])), LEAVE_OUT)


def add_foreign_flags(parser: argparse.ArgumentParser) -> None:
    """Adds what the parser does not have yet: a table may list what has become a flag since."""
    for entry in foreign_flags():
        names = [name for name in entry.names if name not in parser._option_string_actions]
        if names:
            parser.add_argument(
                *names,
                action=_Given,
                nargs=entry.words if entry.words != 1 else None,
                dest=_GIVEN,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            ).entry = entry  # type: ignore[attr-defined]


class _Given(argparse.Action):
    """Keeps the option and its words for ``judge``."""

    entry: ForeignFlag

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        words = [values] if isinstance(values, str) else list(values or ())
        given = [*getattr(namespace, _GIVEN, ()), (self.entry, option_string, words)]
        setattr(namespace, _GIVEN, given)


def judge(args: Namespace) -> list[str]:
    """Takes the foreign options off ``args``; returns a note for each that has no effect.

    Raises:
        UsageError: some of them ask for what is not done here.
    """
    notes, wrong = [], []
    for entry, name, words in vars(args).pop(_GIVEN, ()):
        shown = " ".join([name, *words])
        if _changes_nothing(entry, name, words):
            continue
        if entry.refused:
            wrong.append(f"{shown}: not supported (wanted: {entry.reason})")
        else:
            notes.append(f"{shown}: has no effect, {entry.reason}")
    if wrong:
        raise UsageError(*wrong, unknown=())
    return notes


def _changes_nothing(entry: ForeignFlag, name: str, words: Sequence[str]) -> bool:
    """The default spelt out, or the negative of a switch that is off."""
    if entry.words == 0:
        return len(entry.names) == 2 and name == f"--no-{entry.names[0].removeprefix('--')}"
    return bool(entry.default) and _same(" ".join(words), entry.default)


def _same(text: str, default: str) -> bool:
    try:
        return float(text) == float(default)
    except ValueError:
        return text == default
