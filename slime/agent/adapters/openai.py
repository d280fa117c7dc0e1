"""OpenAI's chat completions and responses, for agents that know no other API."""

import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from slime.agent.adapters.common import UNREADABLE, BaseAdapter, Refused, Turn
from slime.agent.adapters.forced import is_set, strict_calls
from slime.agent.adapters.growing import EventStream, body_of
from slime.agent.adapters.openai_fields import (
    bearer,
    check_functions,
    described,
    error_response,
    forced,
    grammar,
    log_probs_of,
    session_of,
    top_log_probs,
    with_arguments,
)
from slime.agent.adapters.openai_shapes import COMPLETION
from slime.agent.adapters.responses import Responses
from slime.agent.adapters.session import OPENAI_PARAMS, TurnRequest

# Would change the answer, and there is no way to heed them.
_REFUSED = ("logit_bias", "functions", "function_call", "audio", "prediction", "web_search_options")


class OpenAIAdapter(BaseAdapter):
    """Serves ``POST /v1/chat/completions`` and ``/v1/responses``, whole or as server-sent events.

    The session is the bearer token, else ``session_id`` of the request's ``metadata``, else ``user``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.app.router.add_post("/v1/chat/completions", self._complete)
        responses = Responses(self, self._tool_parser, self._tokenizer.decode)
        self.app.router.add_post("/v1/responses", responses.answer)
        self.app.router.add_get("/v1/responses/{id}", responses.get)
        self.app.router.add_delete("/v1/responses/{id}", responses.delete)

    def refusal(self, status: int, reason: str) -> web.Response:
        """The answer to what is refused, as OpenAI's clients read it."""
        return error_response(status, reason)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            if named := bearer(request):
                self.open_session_of(named)
            body = await body_of(request, COMPLETION)
            messages, tools, params = _read(body, self._tool_parser)
            single = not is_set(body, "parallel_tool_calls", default=True)
            asked = TurnRequest(
                session_of(request, body), messages, tools, params, single, model=body.get("model")
            )
            if body.get("stream"):
                return await self._stream(request, body, asked)
            turn = await self.turn(asked, top_log_probs=_top_log_probs(body))
        except Refused as error:
            return error_response(error.status, str(error))
        except UNREADABLE as error:
            return error_response(400, f"not a request for a chat completion: {error!r}")
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
            return await events.send(json.dumps({"error": described(error.status, str(error))}))
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
        return {"content": log_probs_of(turn, self._tokenizer.decode), "refusal": None}


def _read(
    body: Any, tool_parser: str | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any]]:
    """Messages, tools and sampling parameters of a request."""
    messages = [_as_templates_have_it(message) for message in body["messages"]]
    if (number := body.get("n")) not in (None, 1):
        raise Refused(400, f"n {number!r:.200} (wanted: 1, as a session is one conversation)")
    if ignored := [name for name in _REFUSED if body.get(name)]:
        raise Refused(400, f"{ignored[0]} {body[ignored[0]]!r:.200}: not supported (wanted: without)")
    choice = body.get("tool_choice")
    params = {ours: body[name] for name, ours in OPENAI_PARAMS.items() if body.get(name) is not None}
    params |= _grammar(body.get("response_format"))
    # What has no type is a function, as SGLang has it.
    offered = [{"type": "function", **tool} for tool in body.get("tools") or ()]
    tools = None if choice == "none" else offered
    check_functions(tools or ())
    if choice not in (None, "auto", "none"):
        name = None if choice == "required" else choice["function"]["name"]
        params |= forced(name, tools or (), tool_parser, params)
    else:
        params |= strict_calls(tools or (), tool_parser, params, "response_format")
    return messages, tools or None, params


def _grammar(wanted: Mapping[str, Any] | None) -> dict[str, str]:
    """Returns the engine's parameter for ``response_format``."""
    kind = wanted["type"] if wanted else "text"
    holder = (wanted or {}).get("json_schema") or {}
    return grammar(kind, holder, "response_format.json_schema")


def _top_log_probs(body: Mapping[str, Any]) -> int:
    return top_log_probs(body, bool(body.get("logprobs")), "logprobs")


def _as_templates_have_it(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls have mappings as arguments; no template knows developers, who are the system."""
    said = {**message, "role": "system"} if message["role"] == "developer" else message
    calls = message.get("tool_calls")
    return {**said, "tool_calls": [with_arguments(call) for call in calls]} if calls else said


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
