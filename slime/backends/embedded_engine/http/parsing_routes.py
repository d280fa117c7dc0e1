"""``/parse_function_call`` and ``/separate_reasoning``: what the parsers make of a text that a client has."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.http.bodies import Body, Items, read_body
from slime.backends.embedded_engine.http.chat_tools import tool_use
from slime.backends.embedded_engine.http.generate_routes import json_response
from slime.backends.embedded_engine.http.state import state_of
from slime.backends.embedded_engine.reasoning import FORMATS as REASONING
from slime.backends.embedded_engine.reasoning import split
from slime.backends.embedded_engine.tool_calls.formats import FORMATS

router = APIRouter()


class CallsBody(Body):
    text: str
    tools: Items[Any] = Field(default_factory=list)
    tool_call_parser: str | None = None


class ReasoningBody(Body):
    text: str
    reasoning_parser: str
    return_blocks: bool = False


@router.post("/parse_function_call")
async def parse_function_call(request: Request) -> Response:
    body = await read_body(request, CallsBody)
    form = FORMATS.get(body.tool_call_parser or "")
    if form is None:
        raise BadRequest(f"tool_call_parser {body.tool_call_parser!r}: wanted one of {', '.join(FORMATS)}")
    tools = tool_use({"tools": body.tools}).functions
    if not tools:
        return json_response({"normal_text": body.text, "calls": []})
    found = await state_of(request).beside(lambda: form.parse(body.text, tools), body.text)
    numbers = {name: number for number, name in enumerate(tools)}
    calls = [
        {
            "tool_index": numbers[call.name] if form.numbers_by_tool else index,
            "name": call.name,
            "parameters": call.arguments,
        }
        for index, call in enumerate(found.calls)
    ]
    return json_response({"normal_text": found.text, "calls": calls})


@router.post("/separate_reasoning")
async def separate_reasoning(request: Request) -> Response:
    body = await read_body(request, ReasoningBody)
    form = REASONING.get(body.reasoning_parser)
    if form is None:
        raise BadRequest(f"reasoning_parser {body.reasoning_parser!r}: wanted one of {', '.join(REASONING)}")
    reasoning, text = split(form, bool(form.forced), body.text)
    answer: dict[str, Any] = {"reasoning_text": reasoning, "text": text}
    if body.return_blocks:
        blocks = [{"type": "reasoning", "text": reasoning}] if reasoning else []
        answer["reasoning_blocks"], answer["text_blocks"] = [block["text"] for block in blocks], [text]
        answer["blocks"] = [*blocks, {"type": "text", "text": text}]
    return json_response(answer)
