"""Formats whose arguments stand one by one between tags, as text: the tool's schema says what they are."""

import re
from collections.abc import Iterable
from typing import Any

from slime.backends.embedded_engine.tool_calls.base import (
    Call,
    Malformed,
    Parsed,
    ToolFormat,
    Tools,
    dumped,
    known_calls,
    loaded,
)
from slime.backends.embedded_engine.tool_calls.literals import literal

_STRINGS = ("string", "str", "text", "varchar", "char", "enum")
_INTEGERS = ("int", "uint", "long", "short", "unsigned")
_NUMBERS = ("num", "float")
_BOOLEANS = ("boolean", "bool", "binary")
_STRUCTURES = ("object", "array", "arr", "dict", "list")


class Qwen3Coder(ToolFormat):
    """``<function=NAME>`` with ``<parameter=NAME>`` in it, within ``<tool_call>``: Qwen 3 Coder."""

    begins = ("<tool_call>",)
    end = "</tool_call>"
    strips = False
    numbers_by_tool = False
    _function = "<function="
    _function_end = "</function>"
    _parameter = "<parameter="
    _parameter_end = "</parameter>"

    def read(self, block: str, tools: Tools) -> list[Call]:
        return self._functions(block[len(self.begins[0]) : -len(self.end)], tools)

    def read_rest(self, rest: str, tools: Tools) -> Parsed:
        return Parsed("", self._functions(rest, tools) if self._function in rest else [])

    def _functions(self, text: str, tools: Tools) -> list[Call]:
        calls = []
        start = text.find(self._function)
        while start >= 0:
            start += len(self._function)
            end = text.find(self._function_end, start)
            body = text[start:] if end < 0 else text[start:end]
            name, mark, parameters = body.partition(">")
            if mark:
                calls.append(Call(name, dumped(self._arguments(parameters, tools.get(name)))))
            start = -1 if end < 0 else text.find(self._function, end)
        return calls

    def _arguments(self, text: str, tool: Any) -> dict[str, Any]:
        known = properties_of((tool or {}).get("parameters"))
        arguments = {}
        for part in text.split(self._parameter)[1:]:
            name, mark, value = part.partition(self._parameter_end)[0].partition(">")
            if mark:
                value = value.removeprefix("\n").removesuffix("\n")
                arguments[name] = _typed(value, known[name]) if name in known else _or_null(value)
        return arguments


class Glm45(ToolFormat):
    """A name, then ``<arg_key>`` and ``<arg_value>`` in turns, within ``<tool_call>``: GLM 4.5."""

    begins = ("<tool_call>",)
    end = "</tool_call>"
    _name = re.compile(r"\\n|\n")
    _argument = re.compile(r"<arg_key>([^<]*)</arg_key>(?:\\n|\s)*<arg_value>")
    _argument_end = "</arg_value>"

    def read(self, block: str, tools: Tools) -> list[Call]:
        name, *rest = self._name.split(block[len(self.begins[0]) : -len(self.end)], maxsplit=1)
        if not rest:
            raise Malformed("wanted a name and arguments")
        known = properties_of(tools.get(name, {}).get("parameters"))
        arguments: dict[str, Any] = {}
        position = 0
        while (found := self._argument.search(rest[0], position)) is not None:
            end = rest[0].find(self._argument_end, found.end())
            if end < 0:
                break
            key = found.group(1).strip()
            kind = kind_of(known[key]) if key in known else None
            arguments[key] = _read(rest[0][found.end() : end], kind)
            position = end
        return known_calls([{"name": name, "parameters": arguments}], tools)


def _or_null(value: str) -> str | None:
    return None if value.lower() == "null" else value


def _typed(value: str, schema: Any) -> Any:
    """A parameter of Qwen 3 Coder as its schema has it; text where it cannot be that."""
    kind = (kind_of(schema) or "string").strip().lower()
    if value.lower() == "null":
        return None
    if kind in _STRINGS:
        return value
    if kind.startswith(_INTEGERS):
        return _number(value, int)
    if kind.startswith(_NUMBERS):
        number = _number(value, float)
        written_whole = "." not in value and "e" not in value.lower()
        return int(number) if isinstance(number, float) and written_whole and number.is_integer() else number
    if kind in _BOOLEANS:
        return value.lower() == "true"
    if kind.startswith(_STRUCTURES):
        try:
            return loaded(value)
        except Malformed:
            pass
    try:
        return literal(value)
    except Malformed:
        return value


def _number(value: str, kind: type[int] | type[float]) -> Any:
    try:
        return kind(value)
    except ValueError:
        return value


def _read(value: str, kind: str | None) -> Any:
    """An argument of GLM: JSON if it is, else a literal, else text."""
    try:
        found = loaded(value)
    except Malformed:
        try:
            found = loaded(loaded('{"tmp": "' + value + '"}')["tmp"])
        except (Malformed, KeyError, TypeError):
            return _plain(value, kind)
    if kind == "string" and not isinstance(found, str):
        return dumped(found) if isinstance(found, dict | list) else str(found)
    if kind == "number" and isinstance(found, str):
        return _number(found, float if "." in found or "e" in found.lower() else int)
    return found


def _plain(value: str, kind: str | None) -> Any:
    if kind == "string":
        quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'"
        return value[1:-1] if quoted else value
    try:
        return literal(value)
    except Malformed:
        return value


_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_DEEPEST = 50


def properties_of(schema: Any, depth: int = 0) -> dict[str, Any]:
    """Schemas of an object's properties, those of alternatives included if it has none of its own."""
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return {}
    if isinstance(schema.get("properties"), dict):
        return schema["properties"]
    found: dict[str, Any] = {}
    for name in ("anyOf", "oneOf", "allOf"):
        for part in _list(schema.get(name)):
            found = {**properties_of(part, depth + 1), **found}
    return found


def kind_of(schema: Any, depth: int = 0) -> str | None:
    """The type of a value; of alternatives that differ, text before all others."""
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return None
    given = schema.get("type")
    if isinstance(given, str):
        return given
    if isinstance(given, list) and given:
        return next((str(kind) for kind in given if kind != "null"), "string")
    kinds = [
        k for part in _list(schema.get("anyOf") or schema.get("oneOf")) if (k := kind_of(part, depth + 1))
    ]
    if kinds:
        return _common(kinds)
    if isinstance(schema.get("enum"), list):
        names = {_NAMES.get(type(value), "null") for value in schema["enum"]}
        return names.pop() if len(names) == 1 else "string"
    if isinstance(schema.get("allOf"), list):
        parts = (kind_of(part, depth + 1) for part in schema["allOf"])
        return next((kind for kind in parts if kind and kind != "string"), "string")
    if "properties" in schema:
        return "object"
    return "array" if "items" in schema else None


def _common(kinds: Iterable[str]) -> str:
    kinds = list(kinds)
    others = {kind for kind in kinds if kind != "null"}
    if len(others) == 1 and len(set(kinds)) <= 2:
        return others.pop()
    return "string" if "string" in kinds else kinds[0]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
