"""``[get_weather(city="Paris"), now()]``: Llama 4."""

import ast

from slime.backends.embedded_engine.tool_calls.base import Call, Malformed, Parsed, ToolFormat, Tools, dumped
from slime.backends.embedded_engine.tool_calls.literals import parsed, value_of

_MARKS = ("<|python_start|>", "<|python_end|>")
_MAX_FAILURES = 50


class Pythonic(ToolFormat):
    begins = ("[",)
    strips = False
    numbers_by_tool = False

    def parse(self, text: str, tools: Tools) -> Parsed:
        bare = text
        for mark in _MARKS:
            bare = bare.replace(mark, "")
        bare = bare.strip()
        rest = self.read_rest(bare, tools)
        return rest if rest.text != bare else Parsed(text)

    def read_rest(self, rest: str, tools: Tools) -> Parsed:
        """The first brackets that hold calls; everything around them is text."""
        for mark in _MARKS:
            rest = rest.replace(mark, "")
        position = rest.find("[")
        for _ in range(_MAX_FAILURES):
            end = _closing(rest, position) if position >= 0 else -1
            if end < 0:
                break
            try:
                calls = _calls(parsed(rest[position:end]), tools)
                return Parsed(rest[:position] + rest[end:], calls)
            except Malformed:
                position = rest.find("[", position + 1)
        return Parsed(rest)


def _calls(node: ast.expr, tools: Tools) -> list[Call]:
    if not isinstance(node, ast.List) or not node.elts:
        raise Malformed("wanted a list of calls")
    if not all(isinstance(call, ast.Call) for call in node.elts):
        raise Malformed("wanted a list of calls")
    calls = []
    for call in node.elts:
        assert isinstance(call, ast.Call)
        if not isinstance(call.func, ast.Name) or call.func.id not in tools:
            continue
        try:
            given = {str(word.arg): value_of(word.value) for word in call.keywords}
            calls.append(Call(call.func.id, dumped(given)))
        except Malformed:
            continue
    return calls


def _closing(text: str, start: int) -> int:
    """Finds the place behind the bracket that closes the one at ``start``, strings left out, else -1."""
    depth, quote, position = 0, "", start
    while position < len(text):
        character = text[position]
        if quote:
            position += character == "\\"
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "[]":
            depth += 1 if character == "[" else -1
            if depth == 0:
                return position + 1
        position += 1
    return -1
