"""OpenAI's chat completions, for agents that know no other API."""

import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from slime.agent.adapters.common import UNREADABLE, BaseAdapter, Refused, Turn
from slime.agent.adapters.forced import forced_call, is_set
from slime.agent.adapters.growing import EventStream
from slime.agent.adapters.session import OPENAI_PARAMS, TurnRequest

# Of a request, by the names that the engine has for them.
_MAX_TOP_LOG_PROBS = 20
# Would change the answer, and there is no way to heed them.
_REFUSED = ("logit_bias", "functions", "function_call", "audio", "prediction", "web_search_options")


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
            messages, tools, params = _read(body, self._tool_parser)
            single = not is_set(body, "parallel_tool_calls", default=True)
            asked = TurnRequest(session_of(request, body), messages, tools, params, single)
            if body.get("stream"):
                return await self._stream(request, body, asked)
            turn = await self.turn(asked, top_log_probs=_top_log_probs(body))
        except Refused as error:
            return _error(error.status, str(error))
        except UNREADABLE as error:
            return _error(400, f"not a request for a chat completion: {error!r}")
        return web.json_response(self._completion(turn, body))

    def _completion(self, turn: Turn, body: Mapping[str, Any]) -> dict[str, Any]:
        choice = {"index": 0, "message": self.reply_message(turn.output), "finish_reason": _reason(turn)}
        if body.get("logprobs"):
            choice["logprobs"] = self._log_probs(turn)
        return {**_envelope(body, "chat.completion"), "choices": [choice], "usage": _usage(turn)}

    async def _stream(
        self, request: web.Request, body: Mapping[str, Any], asked: TurnRequest
    ) -> web.StreamResponse:
        """The text as it grows; calls of tools, known only at its end, and log-probs in one event."""
        events, envelope = EventStream(request), _envelope(body, "chat.completion.chunk")
        tells_usage = (body.get("stream_options") or {}).get("include_usage")

        async def send(
            delta: dict[str, Any], reason: str | None = None, more: Mapping[str, Any] | None = None
        ) -> None:
            role = {} if events.response else {"role": "assistant", "content": ""}
            choice = {"index": 0, "delta": role | delta, "finish_reason": reason, **(more or {})}
            await events.send(json.dumps({**envelope, "choices": [choice]}))

        async def follow(reasoning: str, text: str) -> None:
            new = {"reasoning_content": reasoning, "content": text}
            await send({name: value for name, value in new.items() if value})

        try:
            turn = await self.turn(asked, follow=follow, top_log_probs=_top_log_probs(body))
        except Refused as error:
            if events.response is None:
                raise
            return await events.send(json.dumps({"error": _described(error.status, str(error))}))
        calls = self.reply_message(turn.output).get("tool_calls", ())
        more = {"logprobs": self._log_probs(turn)} if body.get("logprobs") else {}
        if calls or more:
            indexed = [{**call, "index": i} for i, call in enumerate(calls)]
            await send({"tool_calls": indexed} if indexed else {}, more=more)
        await send({}, _reason(turn))
        if tells_usage:
            await events.send(json.dumps({**envelope, "choices": [], "usage": _usage(turn)}))
        return await events.send("[DONE]")

    def _log_probs(self, turn: Turn) -> dict[str, Any]:
        """Returns the log-probs of the sampled tokens, the one that ends the answer included."""
        tops = turn.top_log_probs or [[] for _ in turn.log_probs]
        content = [
            {**self._log_prob(*pair), "top_logprobs": [self._log_prob(*other) for other in top]}
            for pair, top in zip(turn.log_probs, tops, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _log_prob(self, log_prob: float, token: int) -> dict[str, Any]:
        text = self._tokenizer.decode([token])
        return {"token": text, "logprob": log_prob, "bytes": list(text.encode())}


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


def _read(
    body: Any, tool_parser: str | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any]]:
    """Messages, tools and sampling parameters of a request."""
    messages = [_as_templates_have_it(message) for message in body["messages"]]
    if not messages:
        raise ValueError("no messages")
    if body.get("n", 1) != 1:
        raise ValueError("n other than 1: a session is one conversation")
    if ignored := [name for name in _REFUSED if body.get(name)]:
        raise Refused(400, f"{ignored[0]}: not supported (wanted: without)")
    choice = body.get("tool_choice")
    params = {ours: body[name] for name, ours in OPENAI_PARAMS.items() if body.get(name) is not None}
    params |= _grammar(body.get("response_format"))
    tools = None if choice == "none" else body.get("tools")
    for tool in tools or ():
        if tool.get("type") == "function" and not isinstance(tool["function"]["name"], str):
            raise ValueError(f"a tool's function.name is {tool['function']['name']!r} (wanted: text)")
    if choice not in (None, "auto", "none"):
        if "json_schema" in params:
            raise Refused(400, "tool_choice: a forced call beside response_format (wanted: one of them)")
        name = None if choice == "required" else choice["function"]["name"]
        params |= forced_call(name, tools or (), tool_parser)
    return messages, tools or None, params


def _grammar(wanted: Mapping[str, Any] | None) -> dict[str, str]:
    """Returns the engine's parameter for ``response_format``."""
    kind = wanted["type"] if wanted else "text"
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": json.dumps({"type": "object"})}
    if kind == "json_schema" and wanted:
        return {"json_schema": json.dumps(wanted["json_schema"]["schema"])}
    raise ValueError(f"response_format of type {kind!r} (wanted: text, json_object or json_schema)")


def _top_log_probs(body: Mapping[str, Any]) -> int:
    number = body.get("top_logprobs") or 0
    if not isinstance(number, int) or not 0 <= number <= _MAX_TOP_LOG_PROBS:
        raise ValueError(f"top_logprobs {number!r} (wanted: 0 to {_MAX_TOP_LOG_PROBS})")
    if number and not body.get("logprobs"):
        raise ValueError("top_logprobs without logprobs (wanted: both)")
    return number


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


def _error(status: int, reason: str) -> web.Response:
    return web.json_response({"error": _described(status, reason)}, status=status)


def _described(status: int, reason: str) -> dict[str, Any]:
    return {"message": reason, "type": "invalid_request_error" if status < 500 else "server_error"}
