"""OpenAI's chat completions, for agents that know no other API."""

import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from slime.agent.adapters.common import BaseAdapter, Refused, Turn

# Of a request, by the names that the engine has for them.
_PARAMS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop": "stop",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
}


class OpenAIAdapter(BaseAdapter):
    """Serves ``POST /v1/chat/completions``, whole or as server-sent events.

    The session is the bearer token, else ``session_id`` of the request's ``metadata``, else ``user``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.app.router.add_post("/v1/chat/completions", self._complete)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            if named := _bearer(request):
                self.open_session_of(named)
            body = await request.json()
            messages, tools, params = _read(body)
            turn = await self.turn(session_of(request, body), messages, tools, params)
        except Refused as error:
            return _error(error.status, str(error))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return _error(400, f"not a request for a chat completion: {error!r}")
        if body.get("stream"):
            return await self._stream(request, turn, body)
        return web.json_response(self._completion(turn, body))

    def _completion(self, turn: Turn, body: Mapping[str, Any]) -> dict[str, Any]:
        choice = {"index": 0, "message": self.reply_message(turn.output), "finish_reason": _reason(turn)}
        return {**_envelope(body, "chat.completion"), "choices": [choice], "usage": _usage(turn)}

    async def _stream(self, request: web.Request, turn: Turn, body: Mapping[str, Any]) -> web.StreamResponse:
        """The whole answer in one event: its calls of tools are known only at its end."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        delta = self.reply_message(turn.output)
        for i, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = i
        envelope = _envelope(body, "chat.completion.chunk")
        for choice in (
            {"index": 0, "delta": delta, "finish_reason": None},
            {"index": 0, "delta": {}, "finish_reason": _reason(turn)},
        ):
            await _send(response, {**envelope, "choices": [choice]})
        if (body.get("stream_options") or {}).get("include_usage"):
            await _send(response, {**envelope, "choices": [], "usage": _usage(turn)})
        await response.write(b"data: [DONE]\n\n")
        return response


def session_of(request: web.Request, body: Mapping[str, Any]) -> str:
    """The id of the session that a request belongs to."""
    if token := _bearer(request):
        return token
    named = (body.get("metadata") or {}).get("session_id") or body.get("user")
    if not named:
        raise Refused(401, "no session (wanted: its id as bearer token, metadata.session_id or user)")
    return str(named)


def _bearer(request: web.Request) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _read(body: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any]]:
    """Messages, tools and sampling parameters of a request."""
    messages = [_as_templates_have_it(message) for message in body["messages"]]
    if not messages:
        raise ValueError("no messages")
    if body.get("n", 1) != 1:
        raise ValueError("n other than 1: a session is one conversation")
    params = {ours: body[name] for name, ours in _PARAMS.items() if body.get(name) is not None}
    tools = None if body.get("tool_choice") == "none" else body.get("tools")
    for tool in tools or ():
        if tool.get("type") == "function" and not isinstance(tool["function"]["name"], str):
            raise ValueError(f"a tool's function.name is {tool['function']['name']!r} (wanted: text)")
    return messages, tools or None, params


def _as_templates_have_it(message: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of calls as mappings: a template would write text as text once more."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_with_arguments(call) for call in calls]} if calls else dict(message)


def _with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}


def _reason(turn: Turn) -> str:
    return "tool_calls" if turn.output.tool_calls else turn.finish_reason


def _usage(turn: Turn) -> dict[str, int]:
    total = turn.prompt_tokens + turn.completion_tokens
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.completion_tokens,
        "total_tokens": total,
    }


def _envelope(body: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": body.get("model") or "default",
    }


async def _send(response: web.StreamResponse, event: Mapping[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def _error(status: int, reason: str) -> web.Response:
    return web.json_response({"error": {"message": reason, "type": "invalid_request_error"}}, status=status)
