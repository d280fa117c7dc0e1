"""Calls whose arguments are JSON, where one begins late, ends early, repeats, or is nearly one."""

import pytest

from slime.backends.embedded_engine.tool_calls import literals
from slime.backends.embedded_engine.tool_calls.base import Malformed, ToolFormat, dumped, loaded
from slime.backends.embedded_engine.tool_calls.formats import FORMATS
from slime.backends.embedded_engine.tool_calls.json_formats import JsonArray
from slime.backends.embedded_engine.tool_calls.literals import literal
from tests.each import hold_each

TOOLS = {
    "now": {"parameters": {"properties": {}}},
    "add": {"parameters": {"properties": {"a": {}, "b": {}}}},
    "find": {"parameters": {"properties": {"a": {}, "c": {}}}},
}
NOW, ADD = ("now", "{}"), ("add", '{"a": 1}')
_ADD = '{"name": "add", "parameters": {"a": 1}}'
_NOW = '{"name": "now"}'
_KIMI = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
CASES = [
    ("llama3", _ADD, "", [ADD]),
    ("llama3", f"{_ADD};{_NOW}", "", [ADD, NOW]),
    ("llama3", f"{_ADD};{_ADD}; bye", "bye", [ADD, ADD]),
    ("llama3", f"Look: <|python_tag|>{_NOW}", "Look: ", [NOW]),
    ("llama3", "Look: {}", "Look: {}", []),
    ("llama3", "{'name': 'add', 'parameters': {'a': 1}}", "", [ADD]),
    ("llama3", "<|python_tag|> {'name': 'add', 'parameters': {'a': 1}};" + _NOW, "", [ADD, NOW]),
    ("llama3", "{'name': 'now', 'parameters': {'k': {}}}; then", "then", [("now", '{"k": {}}')]),
    ("llama3", f"{_NOW};" + "{'name': 'add', 'parameters': {'a': 1}}", "", [NOW, ADD]),
    ("llama3", "{'now'}", "{'now'}", []),
    ("llama3", "{'name': 'now'", "{'name': 'now'", []),
    ("llama3", f"{{x {_ADD}", "", [ADD]),
    ("llama3", "{'name': 'now', 'x': '" + "y" * 49_900 + "'}", "", [NOW]),
    ("llama3", "{'name': 'now', 'x': '" + "y" * 50_000 + "'}", None, []),
    ("llama3", '{"name": "other"}', "", []),
    ("llama3", "{x" + '{"name":' * 48 + _ADD, "", [ADD]),
    ("llama3", "{x" + '{"name":' * 49 + _ADD, None, []),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}', "", [ADD]),
    ("mistral", '[TOOL_CALLS] add [ARGS] \n\t{"a": 1} bye', "bye", [ADD]),
    ("mistral", '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]add[ARGS]{"a": 1}', "", [NOW, ADD]),
    ("mistral", "Hi [TOOL_CALLS]now[ARGS]{}", "Hi", [NOW]),
    ("mistral", "Hi [TOOL_CALLS]now[ARGS]{} bye", "Hi bye", [NOW]),
    ("mistral", "[TOOL_CALLS][ARGS]{}", "", []),
    ("mistral", "[TOOL_CALLS]now[ARGS]5", "", []),
    ("mistral", "[TOOL_CALLS]now", "", []),
    ("mistral", f"[TOOL_CALLS] [{_NOW}, {_ADD}] bye", "bye", [NOW, ADD]),
    ("mistral", f"Hi [TOOL_CALLS] [{_NOW}]", "Hi", [NOW]),
    ("mistral", "[TOOL_CALLS] [1]", "", []),
    ("mistral", f"[TOOL_CALLS] [{_NOW}", "", []),
    ("hermes", f"<tool_call>{_NOW}</tool_call>\n<tool_call>{_ADD}", "", [NOW, ADD]),
    ("hermes", f" Hi <tool_call>[{_NOW}, {_ADD}]</tool_call>", "Hi", [NOW, ADD]),
    ("hermes", "<tool_call>1</tool_call>" + f"<tool_call>{_NOW}</tool_call>", "", [NOW]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "", [ADD]),
    (
        *("hermes", '<tool_call>{"name": "add", "parameters": {}, "arguments": {"a": 1}}</tool_call>'),
        *("", [ADD]),
    ),
    ("kimi_k2", _KIMI.format("functions.add:0", '{"a": 1}'), "", [ADD]),
    ("kimi_k2", _KIMI.format(" add:12 ", ' {"a": 1} '), "", [ADD]),
    ("kimi_k2", _KIMI.format("functions.a.b-c:0", "{}"), "", [("a.b-c", "{}")]),
    ("kimi_k2", _KIMI.format("functions.add", "{}"), "", []),
    ("kimi_k2", _KIMI.format("functions.add:0", "[]"), "", []),
    ("kimi_k2", _KIMI.format("functions.add:0", "{"), "", []),
    ("kimi_k2", _KIMI.format("0", '{"a": 1}'), "", [ADD]),
    ("kimi_k2", _KIMI.format("0", '{"a": 1, "c": 2}'), "", [("find", '{"a": 1, "c": 2}')]),
    ("kimi_k2", _KIMI.format("0", '{"a": 1, "x": 2}'), "", [("add", '{"a": 1, "x": 2}')]),
    ("kimi_k2", _KIMI.format("0", '{"x": 1, "y": 2}'), "", []),
    ("kimi_k2", _KIMI.format("0", "{a}"), "", []),
]


def calls_of(form: ToolFormat, text: str, tools=TOOLS):
    found = form.parse(text, tools)
    return found.text, [(call.name, call.arguments) for call in found.calls]


def test_calls_are_read_where_they_stand_and_text_beside_them_is_kept():
    def check(case):
        name, text, said, calls = case
        found = calls_of(FORMATS[name], text)
        assert found[1] == calls
        assert said is None or found[0] == said

    hold_each(CASES, check, name=lambda case: f"{case[0]} {case[1][:90]}")


def test_a_call_without_a_name_is_of_the_only_tool():
    one = {"now": TOOLS["now"]}
    assert calls_of(FORMATS["kimi_k2"], _KIMI.format("0", '{"x": 1}'), one)[1] == [("now", '{"x": 1}')]
    assert calls_of(FORMATS["kimi_k2"], _KIMI.format("0", "{x}"), one)[1] == [("now", "{x}")]


def test_only_a_response_that_is_an_array_of_calls_is_one():
    form = JsonArray()
    assert calls_of(form, f" [{_NOW}]") == ("", [NOW])
    for text in (f"so [{_NOW}]", f" [{_NOW}", f" [{_NOW}] ok", ' [{"parameters": {}}]', " 5", " "):
        assert calls_of(form, text) == (text, [])


def test_how_sglang_numbers_calls_and_trims_text_is_known_of_each_format():
    flags = {name: (form.strips, form.numbers_by_tool) for name, form in FORMATS.items()}
    assert {name for name, (strips, _) in flags.items() if not strips} == {
        "llama3",
        "kimi_k2",
        "pythonic",
        "qwen3_coder",
    }
    assert {name for name, (_, numbers) in flags.items() if not numbers} == {
        "kimi_k2",
        "pythonic",
        "qwen3_coder",
    }


LITERALS = [
    ("1", 1),
    ("-2.5", -2.5),
    ("'a'", "a"),
    ("True", True),
    ("None", None),
    ("[1, (2, 'b')]", [1, [2, "b"]]),
    ("{'a': {1: None}}", {"a": {1: None}}),
    ("{True: 1}", {True: 1}),
]


def test_literals_are_read_and_nothing_else():
    hold_each(LITERALS, lambda case: _equal(literal(case[0]), case[1]))
    for text in (
        "",
        "a",
        "1 + 1",
        "+1",
        "not 1",
        "-'a'",
        "--1",
        "{1}",
        "b'a'",
        "1j",
        "...",
        "{**{}}",
        "{(1,): 1}",
    ):
        with pytest.raises(Malformed):
            literal(text)


def _equal(found, wanted):
    assert (type(found), found) == (type(wanted), wanted)


def test_a_literal_is_read_up_to_its_most_characters(monkeypatch):
    monkeypatch.setattr(literals, "_MAX_CHARACTERS", 5)
    assert literal("'abc'") == "abc"
    with pytest.raises(Malformed, match=r"6 characters \(wanted: at most 5\)"):
        literal("'abcd'")


def test_json_has_no_numbers_that_are_none_and_escapes_halves_of_pairs_alone():
    for text in ("NaN", "[Infinity]", "-Infinity", "{", "[" * 100_000):
        with pytest.raises(Malformed):
            loaded(text)
    for value in (float("nan"), {1, 2}, object()):
        with pytest.raises(Malformed):
            dumped(value)
    assert dumped({"é": "ü"}) == '{"é": "ü"}'
    assert dumped(["é", "\ud800"]) == '["\\u00e9", "\\ud800"]'
