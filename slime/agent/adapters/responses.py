"""OpenAI's responses, whole or as server-sent events; the turns are those of chat completions."""

import json
import time
import uuid
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from slime.agent.adapters.common import UNREADABLE, BaseAdapter
from slime.agent.adapters.growing import EventStream, body_of
from slime.agent.adapters.openai_fields import (
    bearer,
    described,
    error_response,
    log_probs_of,
    session_of,
    with_arguments,
)
from slime.agent.adapters.openai_shapes import RESPONSE
from slime.agent.adapters.responses_request import ResponseRequest, read_request
from slime.agent.adapters.session import KeptResponse, Refused, Session, Turn, TurnRequest

_CLOSES = "</think>"
_KEPT = 256
_ECHOED: dict[str, Any] = {
    **{"instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True},
    **{"previous_response_id": None, "store": True, "temperature": None, "tool_choice": "auto"},
    **{"tools": [], "top_p": None, "text": {"format": {"type": "text"}}, "user": None, "top_logprobs": 0},
}
Item = dict[str, Any]


class Responses:
    """``/v1/responses`` of an adapter.

    A response is kept for ``previous_response_id`` and for who asks for it, unless ``store`` is false: the
    last 256 of each session.
    """

    def __init__(
        self, adapter: BaseAdapter, tool_parser: str | None, decode: Callable[[list[int]], str]
    ) -> None:
        self._adapter, self._tool_parser, self._decode = adapter, tool_parser, decode

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answers a request.

        Raises:
            Refused: never; it becomes an answer.
        """
        try:
            if named := bearer(request):
                self._adapter.open_session_of(named)
            body = await body_of(request, RESPONSE)
            sid = session_of(request, body)
            session = self._adapter.open_session_of(sid)
            wanted = read_request(body, self._tool_parser, session.responses)
            asked = TurnRequest(
                *(sid, wanted.messages, wanted.tools, wanted.params, wanted.single_call),
                model=body.get("model"),
            )
            response = _begun(body)
            if body.get("stream"):
                return await self._stream(request, session, wanted, asked, response)
            turn = await self._adapter.turn(asked, top_log_probs=wanted.top_log_probs)
        except Refused as error:
            return error_response(error.status, str(error))
        except UNREADABLE as error:
            return error_response(400, f"not a request for a response: {error!r}")
        reply = self._adapter.reply_message(turn.output)
        response |= {"output": _items(reply, self._log_probs(wanted, turn))} | self._end(turn)
        _keep(session, wanted, reply, response)
        return web.json_response(response)

    async def get(self, request: web.Request) -> web.Response:
        """Answers with a response that is kept."""
        try:
            for name, value in request.query.items():
                raise Refused(
                    400, f"{name} {value!r:.200} of a kept response: not supported (wanted: without)"
                )
            return web.json_response(self._kept_of(request)[request.match_info["id"]].told)
        except Refused as error:
            return error_response(error.status, str(error))

    async def delete(self, request: web.Request) -> web.Response:
        """Keeps a response no longer; what was generated is trained on all the same."""
        try:
            del self._kept_of(request)[identity := request.match_info["id"]]
        except Refused as error:
            return error_response(error.status, str(error))
        return web.json_response({"id": identity, "object": "response", "deleted": True})

    def _kept_of(self, request: web.Request) -> dict[str, KeptResponse]:
        """Returns what the session keeps, the response that the request names among it.

        Raises:
            Refused: there is no such session, or no such response of it.
        """
        kept = self._adapter.open_session_of(session_of(request, {}), takes_turn=False).responses
        if (identity := request.match_info["id"]) not in kept:
            raise Refused(404, f"response {identity!r}: not kept (wanted: a recent one of the session)")
        return kept

    async def _stream(
        self,
        request: web.Request,
        session: Session,
        wanted: ResponseRequest,
        asked: TurnRequest,
        response: dict[str, Any],
    ) -> web.StreamResponse:
        """Thoughts and text as they grow; calls of tools, known only at the end, each in one piece."""
        events = _Events(EventStream(request), response)
        try:
            turn = await self._adapter.turn(asked, events.follow, wanted.top_log_probs)
        except Refused as error:
            if not events.begun:
                raise
            told = {"code": "server_error", "message": described(error.status, str(error))["message"]}
            return await events.end("failed", {"status": "failed", "error": told})
        reply, ended = self._adapter.reply_message(turn.output), self._end(turn)
        events.log_probs = self._log_probs(wanted, turn)
        await events.rest(_items(reply))
        _keep(session, wanted, reply, response | ended)  # before the agent knows that it is there
        return await events.end(ended["status"], ended)

    def _end(self, turn: Turn) -> dict[str, Any]:
        cut = turn.finish_reason == "length"
        usage = {
            "input_tokens": turn.prompt_tokens,
            "input_tokens_details": {"cached_tokens": turn.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": turn.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._thought_tokens(turn)},
            "total_tokens": turn.prompt_tokens + turn.completion_tokens,
        }
        return {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": usage,
        }

    def _log_probs(self, wanted: ResponseRequest, turn: Turn) -> list[Item]:
        """Returns those of all tokens behind the thoughts, calls and the answer's end among them."""
        return log_probs_of(turn, self._decode)[self._thought_tokens(turn) :] if wanted.log_probs else []

    def _thought_tokens(self, turn: Turn) -> int:
        """Tokens up to the one that closes the thoughts."""
        if not turn.output.has_thoughts:
            return 0
        ids = [token for _, token in turn.log_probs]
        return bisect_left(range(len(ids)), True, key=lambda n: _CLOSES in self._adapter.text_of(ids[:n]))


def _keep(session: Session, wanted: ResponseRequest, reply: dict[str, Any], response: dict[str, Any]) -> None:
    """Keeps a response, with the conversation and the answer as a message of a chat."""
    if wanted.store:
        calls = [with_arguments(call) for call in reply.get("tool_calls", ())]
        said = {**reply, "tool_calls": calls} if calls else reply
        session.responses[response["id"]] = KeptResponse(response, [*wanted.said, said])
        if len(session.responses) > _KEPT:
            del session.responses[next(iter(session.responses))]


def _begun(body: Mapping[str, Any]) -> dict[str, Any]:
    """A response before anything is said."""
    echoed = {name: default if body.get(name) is None else body[name] for name, default in _ECHOED.items()}
    return {
        **{"id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time())},
        **{"model": body.get("model") or "default", "status": "in_progress", "output": [], "usage": None},
        **{"error": None, "incomplete_details": None, "truncation": "disabled", "background": False},
        **{"reasoning": {"effort": None, "summary": None}, **echoed},
    }


def _items(reply: Mapping[str, Any], log_probs: Sequence[Item] = ()) -> list[Item]:
    """The items of an answer."""
    calls = [_call(call) for call in reply.get("tool_calls", ())]
    items = [_said("reasoning", reply["reasoning_content"])] if reply.get("reasoning_content") else []
    items += (
        [_said("message", reply["content"], log_probs=log_probs)] if reply["content"] or not calls else []
    )
    return items + calls


def _said(kind: str, text: str, status: str = "completed", log_probs: Sequence[Item] = ()) -> Item:
    """Thoughts or text; without any that is told, they only begin."""
    part = _part(kind, text, log_probs)
    identity = f"{'rs' if kind == 'reasoning' else 'msg'}_{uuid.uuid4().hex}"
    item = {
        "type": kind,
        "id": identity,
        "status": status,
        "content": [part] if status == "completed" else [],
    }
    more: Item = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
    return item | more


def _part(kind: str, text: str, log_probs: Sequence[Item] = ()) -> Item:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(log_probs)}


def _call(call: Mapping[str, Any]) -> Item:
    return {
        **{"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": call["id"]},
        **{"name": call["function"]["name"], "arguments": call["function"]["arguments"]},
        "status": "completed",
    }


class _Events:
    """The events of a response: its items are opened, added to and closed one after the other.

    Attributes:
        log_probs: what is told of the text's at its end, where all are known.
    """

    def __init__(self, stream: EventStream, response: dict[str, Any]) -> None:
        self._stream, self._response = stream, response
        self._number, self._kind = 0, ""
        self._item: Item = {}
        self._text = ""
        self.log_probs: list[Item] = []

    @property
    def begun(self) -> bool:
        """Whether the client was told something."""
        return self._stream.response is not None

    async def follow(self, reasoning: str, text: str) -> None:
        for kind, new in (("reasoning", reasoning), ("message", text)):
            if new:
                await self._add(kind, new)

    async def rest(self, items: list[Item]) -> None:
        """Tells what `follow` was not told: calls of tools, or that there is no text."""
        if not self._response["output"] and not self._kind and items[0]["type"] == "message":
            await self._begin("message")
        await self._close()
        for item in items:
            if item["type"] == "function_call":
                await self._tell_call(item)

    async def end(self, event: str, ended: Mapping[str, Any]) -> web.StreamResponse:
        await self._close()
        return await self._send(f"response.{event}", response={**self._response, **ended})

    async def _send(self, kind: str, **fields: Any) -> web.StreamResponse:
        if not self.begun:
            for first in ("response.created", "response.in_progress"):
                await self._put(first, response=self._response)
        return await self._put(kind, **fields)

    async def _put(self, kind: str, **fields: Any) -> web.StreamResponse:
        told = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return await self._stream.send(json.dumps(told), kind)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": len(self._response["output"])}

    async def _add(self, kind: str, new: str) -> None:
        if self._kind != kind:
            await self._close()
            await self._begin(kind)
        self._text += new
        name, more = _named(kind)
        await self._send(f"response.{name}.delta", **self._place, content_index=0, delta=new, **more)

    async def _begin(self, kind: str) -> None:
        self._kind, self._text, self._item = kind, "", _said(kind, "", "in_progress")
        index = len(self._response["output"])
        await self._send("response.output_item.added", output_index=index, item=self._item)
        await self._send("response.content_part.added", **self._place, content_index=0, part=_part(kind, ""))

    async def _close(self) -> None:
        if not self._kind:
            return
        name, more = _named(self._kind, self.log_probs)
        part = _part(self._kind, self._text, self.log_probs)
        await self._send(f"response.{name}.done", **self._place, content_index=0, text=self._text, **more)
        await self._send("response.content_part.done", **self._place, content_index=0, part=part)
        await self._done(self._item | {"status": "completed", "content": [part]})
        self._kind = ""

    async def _tell_call(self, item: Item) -> None:
        self._item = item
        index, begun = len(self._response["output"]), {**item, "arguments": "", "status": "in_progress"}
        await self._send("response.output_item.added", output_index=index, item=begun)
        written, about = item["arguments"], "response.function_call_arguments"
        await self._send(f"{about}.delta", **self._place, delta=written)
        await self._send(f"{about}.done", **self._place, name=item["name"], arguments=written)
        await self._done(item)

    async def _done(self, item: Item) -> None:
        index = len(self._response["output"])
        await self._send("response.output_item.done", output_index=index, item=item)
        self._response["output"] = [*self._response["output"], item]


def _named(kind: str, log_probs: Sequence[Item] = ()) -> tuple[str, dict[str, Any]]:
    """What events of a kind of text are called, and what else they have: log-probs without bytes."""
    if kind == "reasoning":
        return "reasoning_text", {}
    return "output_text", {"logprobs": [_without_bytes(one) for one in log_probs]}


def _without_bytes(told: Mapping[str, Any]) -> Item:
    tops = [{name: top[name] for name in ("token", "logprob")} for top in told["top_logprobs"]]
    return {"token": told["token"], "logprob": told["logprob"], "top_logprobs": tops}
