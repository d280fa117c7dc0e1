"""Both ends of HTTP/1.1 with messages that are cut anywhere, and with what is not HTTP."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from slime.router.http_server import ClientConnection, Request
from slime.utils.http_connection import BrokenOff, HttpConnection
from tests.utils.wire import Wire


class Message(NamedTuple):
    """A request or an answer: its first line, its body, and all of it as it is sent."""

    line: bytes
    body: bytes
    raw: bytes


@st.composite
def messages(draw: Any, lines: Sequence[bytes]) -> Message:
    line, parts = draw(st.sampled_from(lines)), draw(st.lists(st.binary(min_size=1, max_size=9), max_size=3))
    body = b"".join(parts)
    wish = b"Connection: upgrade\r\nUpgrade: h2c\r\n"
    head = line + draw(st.sampled_from([b"", b"X: y\r\n", b"x-Y:\tz \r\n", wish]))
    if draw(st.booleans()):
        return Message(line, body, head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    chunks = b"".join(b"%x;a=b\r\n%b\r\n" % (len(part), part) for part in parts)
    end = b"0\r\n" + draw(st.sampled_from([b"", b"Trailer-X: t\r\n"])) + b"\r\n"
    return Message(line, body, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + end)


def pieces_of(raw: bytes, cuts: Sequence[int]) -> list[bytes]:
    at = [0, *sorted({cut % (len(raw) + 1) for cut in cuts}), len(raw)]
    return [raw[a:b] for a, b in pairwise(at) if b > a]


CUTS = st.lists(st.integers(0, 2**16), max_size=6) | st.just(range(2000))
REQUESTS = messages([b"POST /a?b=%00 HTTP/1.1\r\n", b"GET /c HTTP/1.1\r\n", b"PUT * HTTP/1.1\r\n"])
ANSWERS = messages([b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 404 \r\n", b"HTTP/1.1 503 X\r\n"])
# What makes two readers of the same bytes disagree about where a message ends.
NASTY = [
    b"\r",
    b"\n",
    b"\0",
    b" ",
    b":",
    b"\r\n ",
    b"Content-Length: 1\r\n",
    b"0\r\n\r\n",
    b"Connection: Upgrade\r\nUpgrade: h2c\r\n",
    b"chunked,",
    b"\xff",
]
SPOILS = st.lists(st.tuples(st.integers(0, 2**16), st.sampled_from(NASTY), st.booleans()), max_size=3)


def spoilt(raw: bytes, changes: Sequence[tuple[int, bytes, bool]]) -> bytes:
    for place, text, instead in changes:
        at = place % (len(raw) + 1)
        raw = raw[:at] + text + raw[at + len(text) * instead :]
    return raw


Handler = Callable[[Request, ClientConnection], Awaitable[None]]


async def served(pieces: Sequence[bytes]) -> tuple[list[Request], bytes]:
    """The requests that a handler gets, and what the client gets."""
    seen: list[Request] = []

    async def handle(request: Request, client: ClientConnection) -> None:
        seen.append(request)
        client.respond(200, [], b"")

    wire = Wire()
    client = ClientConnection(handle, set())
    client.connection_made(wire)
    for piece in pieces:
        if not wire.is_closing():
            client.data_received(piece)
        while client.task is not None:
            await client.task
    client.connection_lost(None)
    return seen, wire.sent


@settings(max_examples=60, deadline=None)
@given(st.lists(REQUESTS, min_size=1, max_size=4), CUTS)
def test_requests_are_the_same_however_they_are_cut(sent: list[Message], cuts: Sequence[int]) -> None:
    seen, answers = asyncio.run(served(pieces_of(b"".join(message.raw for message in sent), cuts)))
    lines = [b"%b %b HTTP/1.1\r\n" % (request.method, request.target) for request in seen]
    assert lines == [message.line for message in sent]
    assert [request.body for request in seen] == [message.body for message in sent]
    assert not any(name == b"Trailer-X" for request in seen for name, _ in request.headers)
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == len(sent)


@settings(max_examples=100, deadline=None)
@given(st.lists(REQUESTS, min_size=1, max_size=2), SPOILS, CUTS)
def test_what_is_passed_on_is_one_request(
    sent: list[Message], changes: Sequence[tuple[int, bytes, bool]], cuts: Sequence[int]
) -> None:
    """Whatever a client sends: nothing that could begin another line reaches a worker's head."""
    raw = spoilt(b"".join(message.raw for message in sent), changes)
    whole, _ = asyncio.run(served([raw]))
    cut, _ = asyncio.run(served(pieces_of(raw, cuts)))
    for request in (*whole, *cut):
        texts = [request.method, request.target, *(text for pair in request.headers for text in pair)]
        assert not {*b"\r\n\0"} & {*b"".join(texts)}
        lengths = {value for name, value in request.headers if name.lower() == b"content-length"}
        assert len(lengths) <= 1
    assert whole == cut


async def read(pieces: Sequence[bytes]) -> tuple[HttpConnection, bytes | BrokenOff]:
    connection, wire = HttpConnection(), Wire()
    connection.connection_made(wire)
    connection.send(b"GET / HTTP/1.1\r\n\r\n")
    for piece in pieces:
        if not wire.is_closing():
            connection.data_received(piece)
    reusable = connection.reusable
    if not wire.is_closing() and not connection.complete:
        connection.connection_lost(None)
    assert reusable <= connection.complete
    try:
        return connection, await connection.read()
    except BrokenOff as error:
        return connection, error


@settings(max_examples=60, deadline=None)
@given(ANSWERS, st.booleans(), CUTS)
def test_answers_are_the_same_however_they_are_cut(
    sent: Message, goes_on_first: bool, cuts: Sequence[int]
) -> None:
    before = b"HTTP/1.1 102 Processing\r\nX: z\r\n\r\n" if goes_on_first else b""
    connection, body = asyncio.run(read(pieces_of(before + sent.raw, cuts)))
    assert body == sent.body and connection.reusable
    assert sent.line.split()[1] == b"%d" % connection.status
    assert connection.header(b"trailer-x") is None and connection.header(b"x") in (None, b"y")


@settings(max_examples=100, deadline=None)
@given(ANSWERS, SPOILS, CUTS)
def test_no_answer_is_an_error_of_its_own(
    sent: Message, changes: Sequence[tuple[int, bytes, bool]], cuts: Sequence[int]
) -> None:
    connection, body = asyncio.run(read(pieces_of(spoilt(sent.raw, changes), cuts)))
    if isinstance(body, bytes) and connection.content_length is not None:
        assert len(body) == connection.content_length
