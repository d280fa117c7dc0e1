"""A request that one worker prefills and another one decodes, as SGLang's engines want it of a router.

request = HalvedRequest(body)
both = request.meeting_at("10.0.0.5", 8998)   # the body that both halves are sent
reply = await request.answered(prefill, decode)

Both are asked at once, and find one another by what the router adds in front of the client's fields, which
stay as they are. The one that decodes has the answer; what the other says of the prompt is put into it.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import orjson

from slime.utils.http_connection import CannotConnect, HttpConnection

_PATHS = (b"/generate", b"/v1/completions", b"/v1/chat/completions")
_ROOMS = 2**63
_OF_PROMPT = "input_token_logprobs"

Head = asyncio.Task[HttpConnection]
"""Is done when the head of an answer is there."""


class Reply(Protocol):
    """An answer whose head is there."""

    status: int
    headers: list[tuple[bytes, bytes]]

    @property
    def content_length(self) -> int | None: ...

    async def read(self) -> bytes: ...

    def parts(self) -> AsyncIterator[bytes]: ...


class WholeReply:
    """An answer of which nothing is to come."""

    def __init__(self, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self.status, self.headers, self._body = 200, headers, body

    @property
    def content_length(self) -> int:
        return len(self._body)

    async def read(self) -> bytes:
        return self._body

    async def parts(self) -> AsyncIterator[bytes]:
        yield self._body


class Unmet(ConnectionError):
    """One half could not be connected to, so that nothing was made of the request; ``half`` is 0 or 1."""

    def __init__(self, half: int, error: CannotConnect) -> None:
        super().__init__(str(error))
        self.half = half


def is_halved(method: bytes, target: bytes) -> bool:
    """Whether tokens are generated for such a request."""
    return method == b"POST" and target.partition(b"?")[0] in _PATHS


class HalvedRequest:
    """What a client wants.

    Raises:
        ValueError: the body is no JSON object.
    """

    def __init__(self, body: bytes) -> None:
        asked = orjson.loads(body)
        if not isinstance(asked, dict):
            raise ValueError(f"the body is a {type(asked).__name__} (wanted: a JSON object)")
        self._prompts = _prompts_of(asked)
        self._merges = bool(asked.get("return_logprob")) and not asked.get("stream")
        self._fields = body.lstrip()[1:].lstrip()

    def meeting_at(self, host: str | None, port: int | None) -> bytes:
        """The body for both halves, which meet at the one that prefills, in a room of their own."""
        count = self._prompts
        rooms = [secrets.randbelow(_ROOMS) for _ in range(count or 1)]
        meeting: dict[str, Any] = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": rooms[0]}
        if count is not None:
            meeting = {"bootstrap_host": [host] * count, "bootstrap_port": [port] * count}
            meeting["bootstrap_room"] = rooms
        comma = b"" if self._fields.startswith(b"}") else b","
        return orjson.dumps(meeting)[:-1] + comma + self._fields

    async def answered(self, prefill: Head, decode: Head) -> Reply:
        """The answer, or the first refusal of a half.

        Raises:
            Unmet: a half could not be connected to.
            ConnectionError: a half broke off.
        """
        halves: Sequence[Head] = (prefill, decode)
        waiting = set(halves)
        while decode in waiting or (self._merges and waiting):
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for half, task in enumerate(halves):
                if task in done and (reply := _head_of(half, task)).status != 200:
                    return reply
        if not self._merges:
            return decode.result()
        of_prompt, answer = await asyncio.gather(prefill.result().read(), decode.result().read())
        return WholeReply(decode.result().headers, _merged(of_prompt, answer))


def _head_of(half: int, task: Head) -> HttpConnection:
    try:
        return task.result()
    except CannotConnect as error:
        raise Unmet(half, error) from error


def _prompts_of(asked: dict[str, Any]) -> int | None:
    """How many prompts a request is of; None for one that is not in a list."""
    for name, one in (("input_ids", int), ("text", str), ("prompt", str)):
        found = asked.get(name)
        if isinstance(found, list) and found and not (one is int and isinstance(found[0], int)):
            return None if isinstance(found[0], int) else len(found)
    return None


def _merged(of_prompt: bytes, answer: bytes) -> bytes:
    """The answer, with the log-probs of the prompt that the other half has; as it is if that has none."""
    firsts, rests = orjson.loads(of_prompt), orjson.loads(answer)
    found = False
    for first, rest in zip(_metas(firsts), _metas(rests), strict=False):
        if first.get(_OF_PROMPT):
            rest[_OF_PROMPT], found = first[_OF_PROMPT] + (rest.get(_OF_PROMPT) or []), True
    return orjson.dumps(rests) if found else answer


def _metas(answers: Any) -> list[dict[str, Any]]:
    rows = answers if isinstance(answers, list) else [answers]
    return [row.get("meta_info") or {} for row in rows if isinstance(row, dict)]
