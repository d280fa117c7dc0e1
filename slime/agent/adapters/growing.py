"""What the agent asks, and an answer that it is told while the engine writes it, or why there is none."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx
import orjson
from aiohttp import web
from pydantic import TypeAdapter
from transformers import PreTrainedTokenizerBase

from slime.agent.adapters.session import Refused
from slime.agent.adapters.shapes import check
from slime.agent.adapters.stops import until_any
from slime.agent.parsing import ParsedModelOutput
from slime.backends.embedded_engine.tokenizer import GrowingText
from slime.utils.http_utils import HttpStatusError

Follow = Callable[[str, str], Awaitable[None]]
"""Is told what is new of an answer's reasoning and of its text."""

_CALL, _THOUGHT_OPENS, _THOUGHT_CLOSES = "<tool_call>", "<think>", "</think>"
_HALF_A_CHARACTER = "\ufffd"
_SHOWN = 100
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")


class GrowingAnswer:
    """What can be told of an answer that is not whole: no part of it is taken back later.

    Held back are the beginning of what may be a call of a tool or a stop string and everything from there on,
    spaces at the end, and with a reasoning parser everything until the thoughts are closed.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, calls: bool, reasons: bool, stops: Sequence[str] = ()
    ) -> None:
        self._calls, self._reasons, self._stops = calls, reasons, stops
        self._reasoning = self._text = ""
        self._end, self._ids = tokenizer.eos_token_id, list[int]()
        self._decoded = GrowingText(tokenizer, skip_special_tokens=False)

    def more(self, triples: Sequence[Any]) -> tuple[str, str]:
        """New reasoning and new text, of the log-prob, the id and the text of each token so far.

        Only new tokens are decoded: all of them at each would be the square of an answer.
        """
        self._ids += [triple[1] for triple in triples[len(self._ids) :]]
        ended = bool(self._ids) and self._ids[-1] == self._end
        written = self._decoded.update(self._ids[:-1] if ended else self._ids)
        written = until_any(written, self._stops)
        reasoning = ""
        if self._reasons:
            thought, closed, written = written.partition(_THOUGHT_CLOSES)
            if not closed:
                return "", ""
            reasoning = thought.lstrip().removeprefix(_THOUGHT_OPENS).strip()
            written = written.lstrip()
        return self._new(reasoning, self._certain(written))

    def rest(self, parsed: ParsedModelOutput) -> tuple[str, str]:
        """What is left to tell of the whole answer, whose text becomes what was told where spaces differ."""
        if not parsed.text.startswith(self._text):
            parsed.text = self._text
        return self._new(parsed.reasoning, parsed.text)

    def _new(self, reasoning: str, text: str) -> tuple[str, str]:
        found = reasoning[len(self._reasoning) :], text[len(self._text) :]
        self._reasoning, self._text = reasoning, max(text, self._text, key=len)
        return found

    def _certain(self, text: str) -> str:
        text = until_any(text, [_CALL] if self._calls else [])
        return text.rstrip().rstrip(_HALF_A_CHARACTER)


def refused_by(error: HttpStatusError | httpx.TransportError, params: Mapping[str, Any]) -> Refused:
    """Returns what the agent is told of an engine that does not take its request, or of one that fails."""
    if not isinstance(error, HttpStatusError) or error.status != 400:
        return Refused(502, str(error))
    what = next((name for name in _GRAMMARS if name in params), "the request")
    return Refused(400, f"the engine does not take {what}: {_message_of(error.body)}")


def _message_of(body: str) -> str:
    """Returns what an engine says of an error: text, or an object that has it under one or two names."""
    said: Any = body
    with suppress(ValueError):
        said = json.loads(body)
    for key in ("error", "message"):
        said = said.get(key, said) if isinstance(said, dict) else said
    return said if isinstance(said, str) else body


async def body_of(request: web.Request, shape: TypeAdapter[Any]) -> Any:
    """The JSON of a request, whose conversation may be long.

    Raises:
        Refused: it is none, or has not this shape.
    """
    read = await request.read()
    try:
        body = orjson.loads(read)
    except orjson.JSONDecodeError as error:
        raise Refused(400, f"the body {read[:_SHOWN]!r} (wanted: JSON; {error})") from error
    check(shape, body)
    return body


class EventStream:
    """Server-sent events. It begins with the first, so that what is refused before has an HTTP status.

    Attributes:
        response: None until it has begun.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response: web.StreamResponse | None = None

    async def send(self, data: str, event: str | None = None) -> web.StreamResponse:
        if self.response is None:
            self.response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await self.response.prepare(self._request)
        named = f"event: {event}\n" if event else ""
        await self.response.write(f"{named}data: {data}\n\n".encode())
        return self.response
