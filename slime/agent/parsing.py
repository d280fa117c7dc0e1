"""Parses the text of a model into reasoning, answer and calls of tools."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.backends.embedded_engine.tool_calls.tagged_formats import Qwen3Coder

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
_OPENS, _CLOSES, _CALL_BEGINS = "<think>", "</think>", "<tool_call>"
_THOUGHT = re.compile(r"^\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)

# By the names that SGLang has for them.
TOOL_PARSERS = ("hermes", "qwen", "qwen25")
CALL_ENDS = "</tool_call>"
"""Ends a call in the format of each of them."""
REASONING_PARSERS = ("deepseek-r1", "qwen3")


@dataclass(frozen=True)
class ToolCall:
    """``arguments`` is JSON text, as OpenAI's API has it."""

    name: str
    arguments: str


@dataclass
class ParsedModelOutput:
    """An answer in its parts.

    Attributes:
        ill_formed: a call of a tool cannot be read, or is of one that nobody offered; it stays in ``text``.
        has_whole_call: there is a call with its end, well-formed or not.
        has_thoughts: thoughts end in it, empty ones too.
    """

    text: str
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    ill_formed: bool = False
    has_whole_call: bool = False
    has_thoughts: bool = False

    @property
    def tool_uses(self) -> list[dict[str, Any]]:
        """The calls as Anthropic's API has them: ``name`` and ``input``, an object."""
        return [_use(call) for call in self.tool_calls]


def thoughts_are_open(text: str) -> bool:
    """Whether a prompt ends with the beginning of thoughts; further up, a user may have spelt it."""
    return text.rstrip().endswith(_OPENS)


def check_parsers(tool_parser: str | None, reasoning_parser: str | None) -> None:
    """Raises ValueError for a parser that is not here."""
    for what, name, known in (
        ("tool_parser", tool_parser, TOOL_PARSERS),
        ("reasoning_parser", reasoning_parser, REASONING_PARSERS),
    ):
        if name is not None and name not in known:
            raise ValueError(f"{what} {name!r}: not supported (wanted: {', '.join(known)})")


def parse_model_output(
    raw_output: str,
    *,
    tools_schema: Sequence[Mapping[str, Any]] | None,
    tool_parser_name: str | None,
    reasoning_parser_name: str | None,
    thinks: bool = False,
) -> ParsedModelOutput:
    """Takes an answer apart. What thoughts say of calls is none, also of thoughts that were never closed.

    Args:
        tools_schema: the tools on offer; without any, calls are text.
        tool_parser_name: of `TOOL_PARSERS`: calls are JSON objects in ``<tool_call>`` tags.
        reasoning_parser_name: of `REASONING_PARSERS`: what stands before ``</think>``.
        thinks: the answer begins in thoughts.
    """
    check_parsers(tool_parser_name, reasoning_parser_name)
    parsed = ParsedModelOutput(raw_output)
    if reasoning_parser_name:
        if thought := _THOUGHT.match(raw_output):
            parsed.reasoning, parsed.text = thought[1].strip(), raw_output[thought.end() :]
            parsed.has_thoughts = True
        elif thinks or raw_output.lstrip().startswith(_OPENS):
            return parsed
    if not tool_parser_name or not tools_schema:
        return parsed
    parsed.has_whole_call = CALL_ENDS in parsed.text.partition(_CALL_BEGINS)[2]
    offered = {tool["function"]["name"] for tool in tools_schema if tool.get("type") == "function"}
    calls = [_read_call(body, offered) for body in _CALL.findall(parsed.text)]
    if None in calls:
        parsed.ill_formed = True
        return parsed
    parsed.tool_calls = [call for call in calls if call is not None]
    if calls:
        parsed.text = _CALL.sub("", parsed.text).strip()
    return parsed


def parse_xml_tool_uses(
    body_text: str, tools_schema: Sequence[Mapping[str, Any]]
) -> tuple[str, list[dict[str, Any]]]:
    """Returns the text without calls in XML, as Qwen 3 Coder writes them, and these calls as `tool_uses`.

    Args:
        tools_schema: the tools on offer, as OpenAI's or as Anthropic's API has them; others are not called.
    """
    described = [
        tool.get("function") or {**tool, "parameters": tool["input_schema"]} for tool in tools_schema
    ]
    tools = {tool["name"]: tool for tool in described}
    parsed = Qwen3Coder().parse(body_text, tools)
    return parsed.text, [_use(call) for call in parsed.calls if call.name in tools]


def _use(call: Any) -> dict[str, Any]:
    return {"name": call.name, "input": json.loads(call.arguments)}


def _read_call(body: str, offered: set[str]) -> ToolCall | None:
    try:
        call = json.loads(body, parse_constant=_refuse_constant)
        name, arguments = call["name"], call.get("arguments", {})
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)  # 1e999 is read as infinity
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str) or name not in offered or not isinstance(arguments, dict):
        return None
    return ToolCall(name, written)


def _refuse_constant(name: str) -> None:
    """NaN and infinities, which Python reads though JSON has none."""
    raise ValueError(f"{name} is not JSON")
