import json

import pytest

from slime.agent.parsing import ToolCall, parse_model_output, parse_xml_tool_uses, thoughts_are_open

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
    assert parsed.tool_uses == [{"name": "f", "input": {"x": "ä"}}, {"name": "g", "input": {}}]


@pytest.mark.parametrize("form", ["OpenAI", "Anthropic"])
def test_calls_in_xml_have_the_types_of_their_tool(form):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "text": {"type": "string"}}}
    tool = {"name": "f", "input_schema": schema}
    if form == "OpenAI":
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    given = "<parameter=n>\n7\n</parameter>\n<parameter=text>\n7\n</parameter>"
    call = f"<tool_call>\n<function={{}}>\n{given}\n</function>\n</tool_call>"
    text, uses = parse_xml_tool_uses("So: " + call.format("f") + call.format("unknown"), [tool])
    assert text == "So: " and uses == [{"name": "f", "input": {"n": 7, "text": "7"}}]
    assert parse_xml_tool_uses("no call", [tool]) == ("no call", [])


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


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("What is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_thoughts_are_open_where_a_prompt_ends_with_their_beginning(prompt, opened):
    assert thoughts_are_open(prompt) is opened
