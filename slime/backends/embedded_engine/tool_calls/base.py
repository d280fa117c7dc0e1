"""What formats of tool calls have in common."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

Tools = Mapping[str, Mapping[str, Any]]
"""The functions that a model may call, by name, each as the request describes it."""


class Malformed(ValueError):
    """What stands where a call should be is none."""


@dataclass(frozen=True)
class Call:
    """``arguments`` is a JSON text."""

    name: str
    arguments: str


@dataclass
class Parsed:
    """What a text says to the user, and what it calls."""

    text: str = ""
    calls: list[Call] = field(default_factory=list)


class ToolFormat:
    """How calls are written: each between markers, or all of them from the first marker on.

    A format of the second kind has no ``end`` and reads all behind the first marker with ``read_rest``.
    """

    begins: ClassVar[tuple[str, ...]]
    end: ClassVar[str | None] = None
    strips: ClassVar[bool] = True
    """Whether blanks around the text before the first call belong to it."""
    numbers_by_tool: ClassVar[bool] = True
    """Whether SGLang numbers calls by the tools they are of, where it numbers them at all."""
    at_start: ClassVar[tuple[str, ...]] = ()
    """What begins calls only where a response begins."""

    def read(self, block: str, tools: Tools) -> list[Call]:
        """The calls of what is from a marker to its end, both included; none in a format without an end.

        Raises:
            Malformed: there is none.
        """
        return []

    def read_rest(self, rest: str, tools: Tools) -> Parsed:
        """What follows the last marker that has no end; by default such a call is dropped."""
        return Parsed()

    def parse(self, text: str, tools: Tools) -> Parsed:
        """A whole response."""
        start = self.find(text)
        if start < 0:
            return Parsed(text)
        found = Parsed(text[:start].strip() if self.strips else text[:start])
        position = start
        while self.end is not None and position >= 0:
            end = text.find(self.end, position)
            if end < 0:
                break
            end += len(self.end)
            found.calls += self.read_leniently(text[position:end], tools)
            position = _first(text, self.begins, end)
        if position >= 0:
            rest = self.read_rest(text[position:], tools)
            found.text = (found.text + rest.text).strip() if self.strips else found.text + rest.text
            found.calls += rest.calls
        return found

    def find(self, text: str) -> int:
        """Where the first call begins, or -1."""
        return 0 if text.startswith(self.at_start or ("\0",)) else _first(text, self.begins, 0)

    def read_leniently(self, block: str, tools: Tools) -> list[Call]:
        """Calls of a block, none if it is malformed: the others count."""
        try:
            return self.read(block, tools)
        except Malformed:
            return []


def _first(text: str, markers: Iterable[str], start: int) -> int:
    return min((at for marker in markers if (at := text.find(marker, start)) >= 0), default=-1)


def loaded(text: str) -> Any:
    """JSON; without the numbers that are none, at a bounded depth.

    Raises:
        Malformed: it is not JSON.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Malformed(str(error)) from error


def dumped(value: Any) -> str:
    """JSON as SGLang writes it; with escapes where there are halves of surrogate pairs.

    Raises:
        Malformed: JSON does not hold the value.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return text if text.isascii() or not _has_surrogates(text) else json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise Malformed(str(error)) from error


def known_calls(actions: Sequence[Any], tools: Tools) -> list[Call]:
    """Objects with ``name`` and ``parameters`` or ``arguments``, of tools that there are."""
    calls = []
    for action in actions:
        if not isinstance(action, dict):
            raise Malformed("wanted an object with a name")
        name = action.get("name")
        if isinstance(name, str) and name in tools:
            calls.append(Call(name, dumped(action.get("parameters") or action.get("arguments", {}))))
    return calls


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _has_surrogates(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
