import json

import pytest

from slime.agent.parsing import ToolCall, parse_model_output

TOOLS = [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "g"}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "ä"}}\n</tool_call>'


def parse(text, tools=TOOLS, tool_parser="hermes", reasoning_parser=None):
    return parse_model_output(
        text, tools_schema=tools, tool_parser_name=tool_parser, reasoning_parser_name=reasoning_parser
    )


def test_calls_are_taken_out_of_the_text():
    parsed = parse(f"Let me see.\n{CALL}\n<tool_call>" + '{"name": "g"}')
    assert parsed.text == "Let me see." and not parsed.ill_formed
    assert parsed.tool_calls == [ToolCall("f", '{"x": "ä"}'), ToolCall("g", "{}")]
    assert json.loads(parsed.tool_calls[0].arguments) == {"x": "ä"}


@pytest.mark.parametrize(
    "body",
    [
        *("{", "3", "[1]", '{"name": "h", "arguments": {}}', '{"name": "f", "arguments": "x"}'),
        *('{"arguments": {}}', '{"name": ["f"], "arguments": {}}', "[" * 100_000),
        *(f'{{"name": "f", "arguments": {{"x": [{no}]}}}}' for no in ("NaN", "-Infinity", "1e999")),
        '{"name": "f", "arguments": {}, "x": NaN}',
    ],
)
def test_a_call_that_cannot_be_read_stays_text(body):
    parsed = parse(f"<tool_call>{body}</tool_call>{CALL}")
    assert parsed.ill_formed and parsed.tool_calls == [] and body in parsed.text


@pytest.mark.parametrize("options", [{"tools": None}, {"tools": []}, {"tool_parser": None}])
def test_without_tools_or_parser_calls_are_text(options):
    parsed = parse(CALL, **options)
    assert parsed.text == CALL and not parsed.tool_calls and not parsed.ill_formed


@pytest.mark.parametrize("begin", ["<think>", ""])
def test_reasoning_stands_before_its_end(begin):
    parsed = parse(f"{begin}\nhm\n</think>\n\nyes", reasoning_parser="qwen3")
    assert (parsed.reasoning, parsed.text) == ("hm", "yes")
    assert parse("<think>hm", reasoning_parser="qwen3").text == "<think>hm"
    assert parse("<think>a</think>b").text == "<think>a</think>b"


def test_an_unknown_parser_is_refused():
    with pytest.raises(ValueError, match=r"tool_parser 'x': not supported .wanted: hermes, qwen, qwen25"):
        parse("", tool_parser="x")
    with pytest.raises(ValueError, match="reasoning_parser 'x'"):
        parse("", reasoning_parser="x")
