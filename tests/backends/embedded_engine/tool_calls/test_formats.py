"""Calls and reasoning in texts: held to what SGLang's own parsers made of the same texts."""

import json
import random
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from slime.arguments.groups.embedded_engine import EmbeddedServerArgs
from slime.backends.embedded_engine import reasoning
from slime.backends.embedded_engine.tool_calls.formats import FORMATS
from slime.backends.embedded_engine.tool_calls.json_formats import JsonArray
from slime.backends.embedded_engine.tool_calls.stream import CallStream
from slime.backends.embedded_engine.tool_calls.tagged_formats import _read, _typed, kind_of, properties_of
from tests.backends.embedded_engine.tool_calls.corpus import TOOLS, tool_texts
from tests.each import hold_each

KNOWN = {tool["name"]: tool for tool in TOOLS}
RECORDED = json.loads(Path(__file__).with_name("sglang_0.5.23.json").read_text())
MARKS = (
    *(
        "<tool_call>",
        "<tool_call>\n",
        "</tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS] [",
        "[TOOL_CALLS]x[ARGS]{",
    ),
    *(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<function=",
    ),
    *(
        "<parameter=",
        "<arg_key>",
        "<arg_value>",
        "[",
        "(",
        "{",
        '{"name":',
        '"',
        "\\",
        "f(a=",
        "-",
        "now(",
        "lambda:",
    ),
)


def parse(name: str, text: str) -> tuple[str, list[list[str]]]:
    found = FORMATS[name].parse(text, KNOWN)
    return found.text, [[call.name, call.arguments] for call in found.calls]


def streamed(name: str, text: str, seed: int) -> tuple[str, list[list[str]]]:
    chance, stream = random.Random(seed), CallStream(FORMATS[name], KNOWN)
    said, calls, position = "", [], 0
    while position < len(text) or not position:
        size = chance.choice([1, 1, 2, 3, 5, 8, 20])
        found = stream.feed(text[position : position + size], position + size >= len(text))
        position += size
        said += found.text
        calls += [[call.name, call.arguments] for call in found.calls]
    return said, calls


def sane(calls: list[list[str]]) -> list:
    return [[name, json.loads(arguments)] for name, arguments in calls]


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_whole_responses_are_read_as_sglang_reads_them():
    """But where a call is malformed, which SGLang answers in a way of its own for each format, and where its
    pattern for Pythonic calls does not see a call."""

    def alike(case: list) -> None:
        name, text, content, calls = case
        found = parse(name, text)
        if name == "pythonic" and len(found[1]) > len(calls):
            return
        if not all(is_json(arguments) for _, arguments in calls) or (content == text and found[0] != text):
            return  # SGLang gave up
        assert found == (content, calls)

    assert {case[0] for case in RECORDED["calls"]} == set(FORMATS) - {"qwen", "glm"}
    same = sum(parse(name, text) == (content, calls) for name, text, content, calls in RECORDED["calls"])
    assert same > 0.93 * len(RECORDED["calls"])
    hold_each(RECORDED["calls"], alike)


def test_a_stream_adds_up_to_the_whole_however_it_is_cut():
    def adds_up(case: tuple[str, str]) -> None:
        name, text = case
        for seed in range(3):
            said, calls = streamed(name, text, seed)
            whole_text, whole_calls = parse(name, text)
            assert "".join(said.split()) == "".join(whole_text.split()) and calls == whole_calls

    hold_each(tool_texts(12, seed=1), adds_up)


def test_text_is_streamed_at_once_unless_it_may_begin_a_call():
    stream = CallStream(FORMATS["hermes"], KNOWN)
    assert stream.feed("Let me look <").text == "Let me look "
    assert stream.feed("b>").text == "<b>"
    assert stream.feed("<tool_").text == "" and stream.pending == 6
    block = stream.feed('call>{"name": "now", "arguments": {}}</tool_call>')
    assert [(call.name, call.arguments) for call in block.calls] == [("now", "{}")]


def test_reasoning_is_split_as_sglang_splits_it():
    def alike(case: list) -> None:
        name, forced, text, thought, content = case
        form = reasoning.FORMATS[name]
        inside = forced if form.forced is None else form.forced
        assert reasoning.split(form, inside, text) == (thought, content)

    hold_each(RECORDED["reasoning"], alike)


def test_streamed_reasoning_adds_up_to_the_whole():
    """Not so, as on SGLang, where reasoning begins late or a call precedes its end: what is sent is sent."""
    texts = [
        "<think>a b\n</think>\n\nanswer",
        "a b</think>answer",
        "<think>never ends",
        "plain",
        "<thin",
        "<think>a</thin",
    ]
    chance = random.Random(3)
    for text in texts:
        for form in reasoning.FORMATS.values():
            for inside in (False, True):
                for in_one in (False, True):
                    stream = reasoning.ReasoningStream(form, inside, in_one)
                    pieces, position = [], 0
                    while position < len(text):
                        size = chance.choice([1, 2, 5])
                        pieces.append(
                            stream.feed(text[position : position + size], position + size >= len(text))
                        )
                        position += size
                    whole = reasoning.split(form, inside, text)
                    assert tuple(map("".join, zip(*pieces, strict=True))) == whole, (text, form, inside)
                    assert not in_one or sum(bool(thought) for thought, _ in pieces) <= 1


def test_whether_a_chat_reasons_is_read_off_template_and_prompt():
    qwen, opt_in = reasoning.FORMATS["qwen3"], reasoning.FORMATS["mimo"]
    assert qwen.reasons({}) and not qwen.reasons({"enable_thinking": False})
    assert not opt_in.reasons({}) and opt_in.reasons({"enable_thinking": True})
    assert opt_in.begins_in_reasoning({}, "<|im_start|>assistant\n<think>\n")
    assert reasoning.FORMATS["deepseek-r1"].begins_in_reasoning({"enable_thinking": False}, "")


def test_flags_name_the_formats_that_there_are():
    hints = get_type_hints(EmbeddedServerArgs)
    for field, formats in (("tool_call_parser", FORMATS), ("reasoning_parser", reasoning.FORMATS)):
        names = {name for part in get_args(hints[field]) for name in get_args(part)}
        assert names == set(formats)


def test_python_that_a_model_wrote_is_never_run(tmp_path):
    target = tmp_path / "was-run"
    attack = f"__import__('pathlib').Path({str(target)!r}).touch()"
    texts = {
        "pythonic": [
            f"[now(a={attack})]",
            f"[{attack}]",
            f"[now(**{{'a': {attack}}})]",
            f"[now(a=[{attack}])]",
        ],
        "llama3": [f"{{'name': 'now', 'parameters': {{'a': {attack}}}}}"],
        "glm45": [
            f"<tool_call>get_weather\n<arg_key>opt</arg_key><arg_value>{attack}</arg_value></tool_call>"
        ],
        "qwen3_coder": [
            f"<tool_call><function=get_weather><parameter=opt>{attack}</parameter></function></tool_call>"
        ],
    }
    for name, attacks in texts.items():
        for text in attacks:
            for _, arguments in parse(name, text)[1]:
                assert "__import__" in arguments or arguments == "{}"
    assert not target.exists()
    allowed = "[get_weather(city='\\ud800', x=-1, tags=('a',), opt={'k': None, 1: 2.5})]"
    assert sane(parse("pythonic", allowed)[1]) == [
        ["get_weather", {"city": "\ud800", "x": -1, "tags": ["a"], "opt": {"k": None, "1": 2.5}}]
    ]


HOSTILE = [
    *((mark * 200_000)[:1_000_000] for mark in MARKS),
    '<tool_call>{"name": "now", "arguments": ' + '{"a":' * 100_000 + "1" + "}" * 100_000 + "}</tool_call>",
    '<tool_call>\n{"name": "now", "arguments": {"a": ' + "9" * 100_000 + "}}\n</tool_call>",
    '<tool_call>\n{"name": "now", "arguments": {"a": NaN, "b": 1e999}}\n</tool_call>',
    '<tool_call>\n[1, null, {"name": {}}, {"name": ["now"]}, "x"]\n</tool_call>',
    '<|python_tag|>{"name": "now", "parameters": {"s": "\\ud800 <|im_end|> </tool_call> \\u0000"}}',
    '{"name":"' * 50_000 + "[" * 100_000,
    "[now(a=" + "[" * 5_000 + "]" * 5_000 + ")]",
    "[now(a=" + "-" * 50_000 + "1)]",
    "[now(a=" + "(" * 50_000 + ")" * 50_000 + ")]",
    "<tool_call>get_weather\n" + "<arg_key>a</arg_key>" * 40_000 + "</tool_call>",
    "<tool_call><function=now>" + "<parameter=a>" * 70_000 + "</function></tool_call>",
    "[TOOL_CALLS] [" + '{"name": "now", "arguments": {}},' * 30_000,
]


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"qwen", "glm"}))
def test_a_megabyte_of_anything_is_read_and_breaks_nothing(name):
    """What takes more than linear time would take hours. Whatever is called has JSON for arguments."""
    for text in HOSTILE:
        said, calls = parse(name, text)
        assert isinstance(said, str)
        for _, arguments in calls:
            assert name == "kimi_k2" or is_json(arguments)
            arguments.encode()
        stream, pieces = CallStream(FORMATS[name], KNOWN), []
        for start in range(0, len(text), 4096):
            pieces += stream.feed(text[start : start + 4096], start + 4096 >= len(text)).calls
        assert [[call.name, call.arguments] for call in pieces] == calls


def test_forced_calls_are_an_array():
    def calls(text: str) -> tuple[str, list[tuple[str, str]]]:
        found = JsonArray().parse(text, KNOWN)
        return found.text, [(call.name, call.arguments) for call in found.calls]

    assert calls('[{"name": "now", "parameters": {"a": "é"}}, {"name": "x"}]') == (
        "",
        [("now", '{"a": "é"}'), ("x", "{}")],
    )
    assert calls('{"name": "now"}') == ("", [("now", "{}")])
    for other in ('[{"name": "now"', "[1]", "text", "[" * 100_000):
        assert calls(other) == (other, [])


def test_the_kind_of_a_value_is_that_of_its_schema_and_of_its_alternatives():
    table = [
        ({"type": "integer"}, "integer"),
        ({"type": ["null", "number"]}, "number"),
        ({"type": ["null"]}, "string"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "integer"),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "string"),
        ({"anyOf": [{"type": "integer"}, {"type": "array"}, {"type": "null"}]}, "integer"),
        ({"anyOf": [{"oneOf": [{"type": "array"}]}]}, "array"),
        ({"enum": [1, 2]}, "integer"),
        ({"enum": [True]}, "boolean"),
        ({"enum": [1, "a"]}, "string"),
        ({"enum": [None]}, "null"),
        ({"allOf": [{"type": "string"}, {"type": "object"}]}, "object"),
        ({"allOf": [{}, {"anyOf": [{"type": "number"}]}]}, "number"),
        ({"allOf": [{}]}, "string"),
        ({"properties": {}}, "object"),
        ({"items": {}}, "array"),
        ({}, None),
        ("integer", None),
    ]
    hold_each(table, lambda case: _equal(kind_of(case[0]), case[1]))


def test_properties_are_an_objects_own_or_those_of_its_alternatives():
    own, first, second = ({"properties": {"a": {"type": kind}}} for kind in ("string", "integer", "number"))
    assert properties_of({**own, "anyOf": [first]}) == own["properties"]
    assert properties_of({"allOf": [{"oneOf": [first]}, {"properties": {"b": {}}}]}) == {
        "a": {"type": "integer"},
        "b": {},
    }
    assert properties_of({"anyOf": [first, second]})["a"] in ({"type": "integer"}, {"type": "number"})
    assert properties_of(None) == properties_of({"anyOf": "no list"}) == {}
    deep = {"type": "integer", "properties": {"a": 1}}
    for _ in range(60):
        deep = {"anyOf": [deep]}
    assert properties_of(deep) == {} and kind_of(deep) is None
    assert properties_of(deep["anyOf"][0]) == {}
    for _ in range(10):
        deep = deep["anyOf"][0]
    assert properties_of(deep) == {"a": 1} and kind_of(deep) == "integer"


def test_arguments_between_tags_are_what_their_schema_says():
    table = [
        (("5", {"type": "integer"}), 5),
        (("5.5", {"type": "integer"}), "5.5"),
        (("5", {"type": "number"}), 5),
        (("5.0", {"type": "number"}), 5.0),
        (("5e0", {"type": "number"}), 5.0),
        (("x", {"type": "number"}), "x"),
        (("5", {"type": "string"}), "5"),
        (("5", {}), "5"),
        (("NULL", {"type": "string"}), None),
        (("True", {"type": "boolean"}), True),
        (("yes", {"type": "boolean"}), False),
        (('{"a": [1]}', {"type": "object"}), {"a": [1]}),
        (("[1, 'a']", {"type": "array"}), [1, "a"]),
        (("none at all", {"type": "array"}), "none at all"),
        (("(1, 2)", {"type": "tuple"}), [1, 2]),
    ]
    hold_each(table, lambda case: _equal(_typed(*case[0]), case[1]))


def test_arguments_of_glm_are_json_then_literals_then_text():
    table = [
        (("5", None), 5),
        (("5", "string"), "5"),
        (('{"a": 1}', "string"), '{"a": 1}'),
        (('{"a": 1}', "object"), {"a": 1}),
        (('{\\"a\\": 1}', "object"), {"a": 1}),
        (('"5"', "number"), 5),
        (('"5.5"', "number"), 5.5),
        (('"1E2"', "number"), 100.0),
        (('"x"', "number"), "x"),
        (("'a'", "string"), "a"),
        (("'a", "string"), "'a"),
        (("'", "string"), "'"),
        (("a", "string"), "a"),
        (("(1, 2)", None), [1, 2]),
        (("no literal", None), "no literal"),
    ]
    hold_each(table, lambda case: _equal(_read(*case[0]), case[1]))


def _equal(found, wanted):
    assert (type(found), found) == (type(wanted), wanted)
