"""The grammar that makes a model call a tool, in its own format where that has one."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.tool_calls.base import ToolFormat
from slime.backends.embedded_engine.tool_calls.formats import FORMATS
from slime.backends.embedded_engine.tool_calls.json_formats import JsonArray

Function = dict[str, Any]
_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
# For each format of a name: what comes before the arguments, what after them, and what a call begins with.
_TAGS: dict[str, Callable[[str], tuple[str, str, str]]] = {
    "qwen25": lambda name: (
        '<tool_call>\n{"name":"' + name + '", "arguments":',
        "}\n</tool_call>",
        "<tool_call>",
    ),
    "hermes": lambda name: (
        '<tool_call>{"name":"' + name + '", "arguments":',
        "}</tool_call>",
        "<tool_call>",
    ),
    "llama3": lambda name: ('<|python_tag|>{"name":"' + name + '", "arguments":', "}", "<|python_tag|>"),
    "mistral": lambda name: ('[TOOL_CALLS] [{"name":"' + name + '", "arguments":', "}]", "[TOOL_CALLS]"),
    "deepseekv3": lambda name: (
        f"<｜tool▁calls▁begin｜>{_BEGIN}function{_SEPARATOR}{name}\n```json\n",
        f"\n```{_END}<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜>",
    ),
    "deepseekv31": lambda name: (f"{_BEGIN}{name}{_SEPARATOR}", _END, _BEGIN),
}
_TAGS["qwen"] = _TAGS["qwen25"]
_BUILT_IN = {"qwen3_coder": "qwen_3_coder", "kimi_k2": "kimi"}
"""xgrammar's own names of formats that it knows."""


def forced_format(parser: str | None) -> ToolFormat:
    """The format in which forced calls come: an array of JSON where the parser's own cannot be forced."""
    return FORMATS[parser] if parser in _TAGS or parser in _BUILT_IN else JsonArray()


def forcing_params(
    parser: str | None, functions: Sequence[Function], parallel: bool, forced: bool
) -> dict[str, str]:
    """Sampling parameters for a response that calls one of the functions.

    If it need not (not ``forced``), there are some for functions with ``strict`` only, whose calls then
    follow their schemas.
    """
    if not forced and not any(function.get("strict") for function in functions):
        return {}
    if parser in _BUILT_IN:
        return {"structural_tag": _built_in(parser, functions, parallel, forced)}
    if parser in _TAGS:
        return {"structural_tag": _tag(parser, functions, forced)}
    return {"json_schema": json.dumps(_array(functions, parallel))} if forced else {}


def _tag(parser: str, functions: Sequence[Function], forced: bool) -> str:
    structures, triggers = [], set()
    for function in functions:
        begin, end, trigger = _TAGS[parser](function["name"])
        schema = function.get("parameters") if function.get("strict") else None
        structures.append({"begin": begin, "schema": schema or {}, "end": end})
        triggers.add(trigger)
    tag = {"type": "structural_tag", "structures": structures, "triggers": sorted(triggers)}
    return json.dumps({**tag, "at_least_one": forced})


def _built_in(parser: str, functions: Sequence[Function], parallel: bool, forced: bool) -> str:
    try:
        from xgrammar import get_model_structural_tag
    except ImportError as error:
        raise BadRequest("forced tool calls need the package xgrammar on the server") from error
    tools: list[Any] = []
    for function in functions:
        if parser == "kimi_k2" and forced and not function.get("strict"):
            # else xgrammar lets arguments be any JSON, and those of this format are objects
            function = {**function, "strict": True, "parameters": {"type": "object"}}
        tools.append({"type": "function", "function": function})
    tag = get_model_structural_tag(
        model=_BUILT_IN[parser],
        tools=tools,
        tool_choice="required" if forced else "auto",
        reasoning=False,
        parallel_tool_calls=parallel,
    )
    return tag.model_dump_json(by_alias=True)


def _array(functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
    """The schema of an array of calls."""
    calls = []
    definitions: dict[str, Any] = {}
    for function in functions:
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        for name, schema in (parameters.get("$defs") or {}).items():
            if definitions.setdefault(name, schema) != schema:
                raise BadRequest(f"tools: $defs {name!r} differs between tools (wanted: one schema)")
        properties = {"name": {"type": "string", "enum": [function["name"]]}, "parameters": parameters}
        calls.append({"properties": properties, "required": ["name", "parameters"]})
    items = calls[0] if len(calls) == 1 else {"type": "object", "anyOf": calls}
    schema = {"type": "array", "minItems": 1, "items": items}
    if not parallel:
        schema["maxItems"] = 1
    return {**schema, "$defs": definitions} if definitions else schema
