"""Formats whose arguments are JSON."""

import json
import re
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

_DECODER = json.JSONDecoder()
_BRACE = re.compile(r"[{}]")
_LONGEST_LITERAL = 50_000
_MAX_FAILURES = 50
"""Places at which something that is no call is tried as one."""


class Qwen(ToolFormat):
    """``<tool_call>``, a line with an object, ``</tool_call>``: Qwen 2.5 and Qwen 3."""

    begins = ("<tool_call>\n",)
    end = "\n</tool_call>"

    def read(self, block: str, tools: Tools) -> list[Call]:
        return _objects(block[len(self.begins[0]) : -len(self.end)], tools)


class Hermes(ToolFormat):
    """``<tool_call>{...}</tool_call>``; the last one needs no end."""

    begins = ("<tool_call>",)
    end = "</tool_call>"

    def read(self, block: str, tools: Tools) -> list[Call]:
        return _objects(block[len(self.begins[0]) : -len(self.end)], tools)

    def read_rest(self, rest: str, tools: Tools) -> Parsed:
        try:
            return Parsed("", _objects(rest[len(self.begins[0]) :], tools))
        except Malformed:
            return Parsed()


class Llama(ToolFormat):
    """Objects with ``;`` between them, behind ``<|python_tag|>`` or where the response begins: Llama 3."""

    begins = ("<|python_tag|>",)
    at_start = ("{",)
    strips = False

    def read_rest(self, rest: str, tools: Tools) -> Parsed:
        text = rest.removeprefix(self.begins[0])
        actions: list[Any] = []
        position = used = failures = 0
        while position < len(text) and failures < _MAX_FAILURES:
            try:
                action, end = _object_at(text, position)
            except Malformed:
                failures += 1
                position = text.find('{"name":', position + 1)
                if position < 0:
                    break
                continue
            actions.append(action)
            position = used = end + 1
        try:
            return Parsed(text[used:].strip(), known_calls(actions, tools))
        except Malformed:
            return Parsed(text)


class Mistral(ToolFormat):
    """``[TOOL_CALLS] [{...}, ...]``, or ``[TOOL_CALLS]name[ARGS]{...}`` for each call."""

    begins = ("[TOOL_CALLS",)
    _arguments = "[ARGS"

    def read_rest(self, rest: str, tools: Tools) -> Parsed:
        array = rest.find("[TOOL_CALLS] [")
        try:
            if array >= 0:
                actions, end = _raw(rest, array + len("[TOOL_CALLS] "))
                return Parsed(_after(rest, end), known_calls(actions, tools))
        except Malformed:
            return Parsed()
        calls: list[Call] = []
        position = 0
        while (found := self._compact(rest, position)) is not None:
            action, position = found
            calls += known_calls([action], tools)
        return Parsed(_after(rest, position) if calls else "", calls)

    def _compact(self, text: str, position: int) -> tuple[dict[str, Any], int] | None:
        """The call at a position, and where it ends."""
        start = text.find(self.begins[0], position)
        arguments = text.find(self._arguments, start) if start >= 0 else -1
        if arguments < 0:
            return None
        name = text[start + len(self.begins[0]) : arguments].removeprefix("]").strip()
        opening = arguments + len(self._arguments)
        opening += text.startswith("]", opening)
        while text[opening : opening + 1].isspace():
            opening += 1
        if not name or text[opening : opening + 1] not in ("{", "["):
            return None
        try:
            value, end = _raw(text, opening)
        except Malformed:
            return None
        return {"name": name, "arguments": value}, end


class DeepSeekV3(ToolFormat):
    """A kind, a name and a fenced JSON block between the marks of DeepSeek V3."""

    begins = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    end = "<｜tool▁call▁end｜>"
    _separator = "<｜tool▁sep｜>"
    _fence = "\n```json\n"

    def read(self, block: str, tools: Tools) -> list[Call]:
        _, _, call = block.removesuffix(self.end).rpartition(self.begins[1])
        _, mark, call = call.partition(self._separator)
        name, fence, arguments = call.partition(self._fence)
        if not mark or not fence or not arguments.endswith("\n```"):
            raise Malformed("wanted a name and fenced JSON")
        return known_calls([{"name": name, "parameters": loaded(arguments[:-4])}], tools)


class DeepSeekV31(DeepSeekV3):
    """A name and JSON between the marks of DeepSeek V3.1."""

    def read(self, block: str, tools: Tools) -> list[Call]:
        _, _, call = block.removesuffix(self.end).rpartition(self.begins[1])
        name, mark, arguments = call.partition(self._separator)
        if not mark:
            raise Malformed("wanted a name and JSON")
        return known_calls([{"name": name, "parameters": loaded(arguments)}], tools)


class KimiK2(ToolFormat):
    """``functions.NAME:NUMBER`` and JSON, which is passed on as it is, between the marks of Kimi K2."""

    begins = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    end = "<|tool_call_end|>"
    strips = False
    numbers_by_tool = False
    _mark = "<|tool_call_argument_begin|>"
    _name = re.compile(r"(?:functions\.)?([\w.\-]+):\d+")

    def read(self, block: str, tools: Tools) -> list[Call]:
        _, _, call = block.removesuffix(self.end).rpartition(self.begins[1])
        head, mark, arguments = call.partition(self._mark)
        arguments = arguments.strip()
        if not mark or not arguments.startswith("{") or not arguments.endswith("}"):
            raise Malformed("wanted an id and a JSON object")
        named = self._name.fullmatch(head.strip())
        if named is not None:
            return [Call(named.group(1), arguments)]
        name = _likeliest(arguments, tools) if head.strip().isdecimal() else None
        return [Call(name, arguments)] if name is not None else []


class JsonArray(ToolFormat):
    """The whole response is an array of calls: what a grammar of JSON forces a model to write."""

    begins = ("\0",)
    at_start = ("[", "{", " ", "\n", "\t", "\r")
    strips = False

    def read_rest(self, rest: str, tools: Tools) -> Parsed:
        try:
            found = loaded(rest)
            actions = [found] if isinstance(found, dict) else found
            if not isinstance(actions, list) or not all(isinstance(a, dict) and "name" in a for a in actions):
                return Parsed(rest)
            return Parsed("", [Call(str(a["name"]), dumped(a.get("parameters", {}))) for a in actions])
        except Malformed:
            return Parsed(rest)


def _objects(text: str, tools: Tools) -> list[Call]:
    found = loaded(text.strip())
    return known_calls(found if isinstance(found, list) else [found], tools)


def _raw(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at ``start``, and where it ends."""
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise Malformed(str(error)) from error


def _object_at(text: str, start: int) -> tuple[Any, int]:
    """A JSON value, or an object in Python's notation."""
    try:
        return _raw(text, start)
    except Malformed:
        depth = 0
        for brace in _BRACE.finditer(text, start, start + _LONGEST_LITERAL):
            depth += 1 if brace.group() == "{" else -1
            if depth == 0:
                value = literal(text[start : brace.end()].strip())
                if not isinstance(value, dict):
                    raise Malformed("wanted an object") from None
                return value, brace.end()
        raise


def _after(text: str, end: int) -> str:
    """Text behind calls, with a blank before it, as SGLang joins it to the text before them."""
    rest = text[end:].strip()
    return f" {rest}" if rest else ""


def _likeliest(arguments: str, tools: Tools) -> str | None:
    """The tool whose parameters are most like the arguments of a call that has no name."""
    if len(tools) == 1:
        return next(iter(tools))
    try:
        given = loaded(arguments)
    except Malformed:
        return None
    best, best_score = None, -1
    for name, tool in tools.items():
        properties = (tool.get("parameters") or {}).get("properties") or {}
        score = len(given.keys() & properties.keys()) - len(given.keys() - properties.keys())
        if properties and score > best_score:
            best, best_score = name, score
    return best
