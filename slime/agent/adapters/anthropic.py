"""Anthropic's messages, for agents that know no other API."""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aiohttp import web

from slime.agent.adapters.anthropic_shapes import MESSAGES
from slime.agent.adapters.common import UNREADABLE, BaseAdapter, Refused, Turn
from slime.agent.adapters.forced import forced_call, is_set, strict_calls
from slime.agent.adapters.growing import EventStream, body_of
from slime.agent.adapters.session import TurnRequest, reminder

# Of a request, by the names that the engine has for them.
_PARAMS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_sequences": "stop",
    "max_tokens": "max_new_tokens",
}
_REASONS = {"stop": "end_turn", "length": "max_tokens"}
_ERRORS = {
    **{401: "authentication_error", 403: "permission_error", 404: "not_found_error"},
    **{413: "request_too_large", 429: "rate_limit_error", 529: "overloaded_error"},
}
_STATUSES = {503: 529}
"""What this API has instead of a status of HTTP."""
_THINKING = {"enabled": True, "disabled": False, "adaptive": None}
_LEAST_BUDGET = 1024
_Message = dict[str, Any]


class AnthropicAdapter(BaseAdapter):
    """Serves ``POST /v1/messages``, whole or as server-sent events, and ``/v1/messages/count_tokens``.

    The session is the bearer token, else the header ``X-Api-Key``. The count is that of the prompt which the
    engine would get: of a conversation that goes on with the tokens of its answers.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.app.router.add_post("/v1/messages", self._answer)
        self.app.router.add_post("/v1/messages/count_tokens", self._count)

    def refusal(self, status: int, reason: str) -> web.Response:
        """The answer to what is refused, as Anthropic's clients read it."""
        return _error(status, reason)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            sid = _session_of(request)
            self.open_session_of(sid)
            body = await body_of(request, MESSAGES)
            single = is_set(body.get("tool_choice") or {}, "disable_parallel_tool_use", default=False)
            read, thinks = _read(body, self._tool_parser), self._wants_thoughts(body)
            asked = TurnRequest(sid, *read, single, thinks, body.get("model"))
            if body.get("stream"):
                return await self._stream(request, body, asked)
            turn = await self.turn(asked)
        except Refused as error:
            return _error(error.status, str(error))
        except UNREADABLE as error:
            return _error(400, f"not a request for a message: {error!r}")
        return web.json_response(
            _message(body) | {"content": _blocks(turn)} | _ended(turn) | {"usage": _usage(turn)}
        )

    async def _stream(self, request: web.Request, body: _Message, asked: TurnRequest) -> web.StreamResponse:
        """Thoughts and text as they grow; calls of tools, known only at the end, each in one piece."""
        blocks = _Blocks(EventStream(request), _message(body))
        try:
            turn = await self.turn(asked, follow=blocks.follow)
        except Refused as error:
            if blocks.events.response is None:
                raise
            return await blocks.send({"type": "error", "error": _described(error.status, str(error))})
        return await blocks.end(turn)

    async def _count(self, request: web.Request) -> web.Response:
        try:
            sid = _session_of(request)
            self.open_session_of(sid, takes_turn=False)
            body = await body_of(request, MESSAGES)
            messages, tools, _ = _read(body, self._tool_parser)
            count = self.prompt_tokens(
                TurnRequest(
                    *(sid, messages, tools, {}),
                    thinks=self._wants_thoughts(body),
                    model=body.get("model"),
                )
            )
        except Refused as error:
            return _error(error.status, str(error))
        except UNREADABLE as error:
            return _error(400, f"not a request for a count of tokens: {error!r}")
        return web.json_response({"input_tokens": count})

    def _wants_thoughts(self, body: Mapping[str, Any]) -> bool | None:
        """What the chat template is told of thoughts.

        Raises:
            Refused: they are wanted of a model that has none, as far as its template and parser tell.
        """
        thinks = _thinking(body.get("thinking"))
        if thinks and not (self._prompts.switches_thoughts or self._reasoning_parser):
            none = "the chat template has no enable_thinking, and there is no reasoning parser"
            raise Refused(400, f"thinking.type 'enabled': {none} (wanted: disabled or without)")
        return thinks


def _session_of(request: web.Request) -> str:
    """The id of the session that a request belongs to."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    key = token if scheme.lower() == "bearer" else ""
    if named := key.strip() or request.headers.get("X-Api-Key", "").strip():
        return named
    raise Refused(401, "no session (wanted: its id as bearer token or X-Api-Key)")


def _read(
    body: Any, tool_parser: str | None
) -> tuple[list[_Message], list[dict[str, Any]] | None, dict[str, Any]]:
    """Messages, tools and sampling parameters of a request, as chat templates and the engine have them."""
    system = _text_of(body.get("system") or "")
    messages: list[_Message] = [{"role": "system", "content": system}] if system else []
    for message in body["messages"]:
        messages += _chat_messages(message["role"], message["content"])
    params = {ours: body[name] for name, ours in _PARAMS.items() if body.get(name) is not None}
    choice = (body.get("tool_choice") or {}).get("type", "auto")
    tools = [] if choice == "none" else [_function(tool) for tool in body.get("tools") or ()]
    if choice in ("any", "tool"):
        name = body["tool_choice"].get("name") if choice == "tool" else None
        if choice == "tool" and not name:
            raise Refused(400, f"tool_choice.name {name!r} (wanted: that of a tool)")
        params |= forced_call(name, tools, tool_parser)
    else:
        params |= strict_calls(tools, tool_parser, params, "a format")
    return messages, tools or None, params


def _thinking(wanted: Mapping[str, Any] | None) -> bool | None:
    """Whether a request has thoughts on or off. No engine counts them, so a budget bounds nothing."""
    if wanted is None:
        return None
    kind, budget = wanted["type"], wanted.get("budget_tokens")
    if kind == "enabled" and (type(budget) is not int or budget < _LEAST_BUDGET):
        raise Refused(400, f"thinking.budget_tokens {budget!r:.200} (wanted: {_LEAST_BUDGET} or more)")
    return _THINKING[kind]


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as OpenAI's API has it."""
    described = {"description": tool["description"]} if tool.get("description") else {}
    strict = {"strict": True} if is_set(tool, "strict", default=False) else {}
    function = {"name": tool["name"], **described, "parameters": tool["input_schema"], **strict}
    return {"type": "function", "function": function}


def _chat_messages(role: str, content: Any) -> Iterator[_Message]:
    """One message of a chat, or several: results of tools are messages of their own there."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if role == "assistant":
        yield _said(blocks)
        return
    if role == "system":  # templates want it in the first place only
        yield reminder(_text_of(blocks))
        return
    text = []
    for block in blocks:
        if block["type"] != "tool_result":
            text.append(block)
            continue
        if text:
            yield {"role": "user", "content": _text_of(text)}
            text = []
        result = {"tool_call_id": block["tool_use_id"], "content": _text_of(block.get("content") or "")}
        yield {"role": "tool", **result, **({"is_error": True} if block.get("is_error") else {})}
    if text or not blocks:
        yield {"role": "user", "content": _text_of(text)}


def _said(blocks: Sequence[Mapping[str, Any]]) -> _Message:
    """An answer that the agent sends back."""
    calls = [block for block in blocks if block["type"] == "tool_use"]
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    rest = [block for block in blocks if block["type"] not in ("tool_use", "thinking")]
    message: _Message = {"role": "assistant", "content": _text_of(rest)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = [
            {
                **{"id": call["id"], "type": "function"},
                "function": {"name": call["name"], "arguments": call["input"]},
            }
            for call in calls
        ]
    return message


def _text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(block["text"] for block in content)


def _message(body: Mapping[str, Any]) -> _Message:
    """An answer before anything is said."""
    return {
        **{"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"},
        **{"model": body.get("model") or "default", "content": []},
        **{"stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": 0, "output_tokens": 0}},
    }


def _blocks(turn: Turn) -> list[dict[str, Any]]:
    """The content of an answer."""
    output, calls = turn.output, _calls(turn)
    thoughts = [{"type": "thinking", "thinking": output.reasoning, "signature": ""}]
    text = [{"type": "text", "text": output.text}] if output.text or not calls else []
    return [*(thoughts if output.reasoning else ()), *text, *calls]


def _calls(turn: Turn) -> list[dict[str, Any]]:
    return [
        {
            **{"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}"},
            **{"name": call.name, "input": json.loads(call.arguments)},
        }
        for call in turn.output.tool_calls
    ]


def _ended(turn: Turn) -> dict[str, str | None]:
    """Why an answer ended, and the stop string that ended it."""
    if turn.output.tool_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    reason = "stop_sequence" if turn.stop_string else _REASONS.get(turn.finish_reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": turn.stop_string}


def _usage(turn: Turn) -> dict[str, int]:
    return {"input_tokens": turn.prompt_tokens, "output_tokens": turn.completion_tokens}


class _Blocks:
    """The events of an answer: its blocks are opened, added to and closed one after the other."""

    def __init__(self, events: EventStream, message: _Message) -> None:
        self.events = events
        self._message = message
        self._index, self._open = -1, ""

    async def send(self, event: dict[str, Any]) -> web.StreamResponse:
        if self.events.response is None:
            await self.events.send(
                json.dumps({"type": "message_start", "message": self._message}), "message_start"
            )
        return await self.events.send(json.dumps(event), event["type"])

    async def follow(self, reasoning: str, text: str) -> None:
        for kind, new in (("thinking", reasoning), ("text", text)):
            if new:
                signature = {"signature": ""} if kind == "thinking" else {}
                await self._add({"type": kind, kind: "", **signature}, {"type": f"{kind}_delta", kind: new})

    async def end(self, turn: Turn) -> web.StreamResponse:
        if self._index < 0 and not turn.output.tool_calls:
            await self._begin({"type": "text", "text": ""})
        for call in _calls(turn):
            await self._close()
            written = json.dumps(call["input"])
            await self._add({**call, "input": {}}, {"type": "input_json_delta", "partial_json": written})
        await self._close()
        await self.send({"type": "message_delta", "delta": _ended(turn), "usage": _usage(turn)})
        return await self.send({"type": "message_stop"})

    async def _add(self, block: dict[str, Any], delta: dict[str, Any]) -> None:
        if self._open != block["type"]:
            await self._close()
            await self._begin(block)
        await self.send({"type": "content_block_delta", "index": self._index, "delta": delta})

    async def _begin(self, block: dict[str, Any]) -> None:
        self._index, self._open = self._index + 1, block["type"]
        await self.send({"type": "content_block_start", "index": self._index, "content_block": block})

    async def _close(self) -> None:
        if self._open:
            self._open = ""
            await self.send({"type": "content_block_stop", "index": self._index})


def _error(status: int, reason: str) -> web.Response:
    status = _STATUSES.get(status, status)
    return web.json_response({"type": "error", "error": _described(status, reason)}, status=status)


def _described(status: int, reason: str) -> dict[str, str]:
    status = _STATUSES.get(status, status)
    fallback = "api_error" if status >= 500 else "invalid_request_error"
    return {"type": _ERRORS.get(status, fallback), "message": reason}
