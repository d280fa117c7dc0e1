"""The server's end of HTTP/1.1, against what clients might send."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from slime.router import http_server
from slime.router.http_server import READ_TIMEOUT_S, ClientConnection, Request
from slime.utils.http_connection import HEAD_BYTES
from tests.utils.wire import Wire


class Echo:
    """Answers with method, target and body; ``/stream`` in parts, ``/fail`` not at all."""

    def __init__(self) -> None:
        self.seen: list[Request] = []
        self.go_on = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def handle(self, request: Request, client: ClientConnection) -> None:
        self.seen.append(request)
        if request.target == b"/wait":
            try:
                await self.go_on.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        if request.target == b"/fail":
            raise ValueError("no")
        if request.target != b"/stream":
            client.respond(
                200, [(b"X-Of", b"server")], b" ".join([request.method, request.target, request.body])
            )
            return
        client.begin(200, [], None)
        for part in (b"ab", b"", b"c"):  # what is empty is not the end
            await client.write(part)
        client.end()


@pytest.fixture
async def echo() -> AsyncIterator[tuple[Echo, int]]:
    echo = Echo()
    clients: set[ClientConnection] = set()
    server = await asyncio.get_running_loop().create_server(
        lambda: ClientConnection(echo.handle, clients), "127.0.0.1", 0
    )
    yield echo, server.sockets[0].getsockname()[1]
    server.close()
    for client in list(clients):
        client.abort()


async def exchanged(port: int, *pieces: bytes) -> bytes:
    """What the server sends until it ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    return answer


LAST = b"Connection: close\r\n\r\n"


async def test_requests_of_one_connection_are_answered_in_order(echo) -> None:
    server, port = echo
    first, second = b"POST /a?b=%2F HTTP/1.1\r\nContent-Length: 3\r\n\r\nxyz", b"GET /stream HTTP/1.1\r\n\r\n"
    answer = await exchanged(port, first + second + b"GET /c HTTP/1.1\r\n" + LAST)
    assert answer == (
        b"HTTP/1.1 200 OK\r\nX-Of: server\r\nContent-Length: 17\r\n\r\nPOST /a?b=%2F xyz"
        + b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
        + b"HTTP/1.1 200 OK\r\nX-Of: server\r\nContent-Length: 7\r\nConnection: close\r\n\r\nGET /c "
    )
    assert [request.keeps for request in server.seen] == [True, True, False]


async def test_bodies_come_in_chunks_or_in_pieces(echo) -> None:
    server, port = echo
    head = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + LAST
    await exchanged(port, head[:20], head[20:], b"2\r\nab\r\n", b"1\r\nc\r\n0\r\n\r\n")
    await exchanged(port, b"POST / HTTP/1.1\r\nContent-Length: 3\r\n" + LAST, b"ab", b"c")
    assert [request.body for request in server.seen] == [b"abc", b"abc"]


async def test_who_asks_whether_to_go_on_is_told(echo) -> None:
    _, port = echo
    answer = await exchanged(
        port, b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 1\r\n" + LAST, b"a"
    )
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("target", [b"/", b"/stream"])
async def test_an_answer_to_head_has_no_body(target: bytes, echo) -> None:
    _, port = echo
    answer = await exchanged(port, b"HEAD " + target + b" HTTP/1.1\r\n" + LAST)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and answer.endswith(b"\r\n\r\n")
    assert (b"Content-Length: 7" in answer) == (target == b"/") and b"chunked" not in answer


async def test_an_old_client_gets_one_answer(echo) -> None:
    _, port = echo
    answer = await exchanged(port, b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert b"Connection: close" in answer and answer.endswith(b"GET / ")


async def test_an_old_client_gets_nothing_that_it_does_not_know(echo) -> None:
    _, port = echo
    head = b"POST /stream HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n"
    answer = await exchanged(port, head, b"x")
    assert answer == b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabc"


async def test_what_follows_a_body_is_no_header(echo) -> None:
    """Else a client could bring headers past whoever looks at those before the body."""
    server, port = echo
    head = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n"
    body = b"\r\n1\r\nx\r\n0\r\nAuthorization: Bearer key\r\nX: y\r\n\r\n"
    await exchanged(port, head + body + b"GET / HTTP/1.1\r\n" + LAST)
    names = [[name for name, _ in request.headers] for request in server.seen]
    assert names == [[b"Transfer-Encoding"], [b"Connection"]]


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"hello\r\n\r\n", b"not HTTP/1.1"),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", b"not HTTP/1.1"),
        (b"CONNECT a:1 HTTP/1.1\r\n\r\n", b"a tunnel is not served"),
        (b"CONNECT a:1 HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", b"a tunnel"),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * HEAD_BYTES, b"over %d bytes" % HEAD_BYTES),
    ],
)
async def test_what_cannot_be_understood_is_refused(raw: bytes, why: bytes, echo) -> None:
    server, port = echo
    answer = await exchanged(port, raw)
    assert answer.startswith(b"HTTP/1.1 400 ") and why in answer
    assert server.seen == []


WISH = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"


@pytest.mark.parametrize("size", [1, 7, 10**6])
async def test_another_protocol_may_be_wished_for_in_vain(size: int, echo) -> None:
    """RFC 9110, section 7.8; Java's client wishes for HTTP/2 with each first request."""
    server, port = echo
    raw = (
        b"POST /a HTTP/1.1\r\nExpect: 100-continue\r\n" + WISH + b"Content-Length: 3\r\n\r\nabc"
        b"GET /b HTTP/1.1\r\n" + WISH + b"\r\n"
        b"POST /c HTTP/1.1\r\n" + WISH + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
        b"GET /d HTTP/1.1\r\nConnection: close, Upgrade\r\nUpgrade: websocket\r\n\r\n"
    )
    answer = await exchanged(port, *(raw[at : at + size] for at in range(0, len(raw), size)))
    assert [(request.target, request.body) for request in server.seen] == [
        *((b"/a", b"abc"), (b"/b", b""), (b"/c", b"ab"), (b"/d", b""))
    ]
    assert [request.keeps for request in server.seen] == [True, True, True, False]
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == 4 and answer.endswith(b"GET /d ")
    assert answer.count(b"HTTP/1.1 100 ") == 1


async def test_what_comes_before_a_fault_is_answered(echo) -> None:
    server, port = echo
    answer = await exchanged(port, b"GET /a HTTP/1.1\r\n\r\nGET /b HTTP/1.1\r\n\r\nrubbish\r\n\r\n")
    assert [request.target for request in server.seen] == [b"/a", b"/b"]
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == 2 and answer.count(b"HTTP/1.1 400 ") == 1
    assert answer.index(b"GET /b ") < answer.index(b"HTTP/1.1 400 ")


async def test_more_than_the_last_request_is_no_fault_of_it(echo) -> None:
    _, port = echo
    answer = await exchanged(port, b"GET / HTTP/1.1\r\n" + LAST + b"GET /more HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and answer.endswith(b"GET / ")


async def test_a_fault_behind_a_request_that_is_served_waits_for_it() -> None:
    server, wire = Echo(), Wire()
    client = ClientConnection(server.handle, set())
    client.connection_made(wire)
    client.data_received(b"GET /wait HTTP/1.1\r\n\r\n")
    client.data_received(b"rubbish\r\n\r\n")
    client.data_received(b"GET /more HTTP/1.1\r\n\r\n")
    assert not wire.sent and not wire.closed
    server.go_on.set()
    assert client.task is not None
    await client.task
    assert wire.sent.startswith(b"HTTP/1.1 200 ") and wire.sent.count(b"HTTP/1.1 400 ") == 1 and wire.closed
    client.connection_lost(None)


async def test_a_fault_of_the_handler_is_a_500_and_the_connection_goes_on(echo) -> None:
    _, port = echo
    answer = await exchanged(port, b"GET /fail HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n" + LAST)
    assert answer.startswith(b"HTTP/1.1 500 ") and answer.endswith(b"GET / ")


async def test_who_goes_away_ends_the_work(echo) -> None:
    server, port = echo
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /wait HTTP/1.1\r\n\r\n")
    async with asyncio.timeout(60):
        while not server.seen:
            await asyncio.sleep(0.005)
        writer.close()
        await server.cancelled.wait()


async def test_requests_do_not_pile_up_behind_a_slow_one() -> None:
    server, wire = Echo(), Wire()
    client = ClientConnection(server.handle, set())
    client.connection_made(wire)
    client.data_received(b"GET /wait HTTP/1.1\r\n\r\n")
    assert not wire.paused, "its end would not be noticed"
    client.data_received(b"GET /wait HTTP/1.1\r\n\r\nGET /c HTTP/1.1\r\n\r\n")
    assert wire.paused
    server.go_on.set()
    while client.task is not None:
        await client.task
    assert not wire.paused and [request.target for request in server.seen] == [b"/wait", b"/wait", b"/c"]


def silent(client: ClientConnection, since: float) -> None:
    """Has the server believe that nothing came from a client for so many seconds."""
    client._since -= since
    client._look()


async def test_a_client_that_never_finishes_its_request_is_sent_away() -> None:
    server, wire = Echo(), Wire()
    client = ClientConnection(server.handle, set())
    client.connection_made(wire)
    client.data_received(b"GET / HTTP/1.1\r\nX: ")
    silent(client, READ_TIMEOUT_S / 2)
    client.data_received(b"a byte now and then does not count")
    assert not wire.closed
    silent(client, READ_TIMEOUT_S / 2)
    assert wire.closed and wire.sent.startswith(b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\n")
    client.connection_lost(None)
    assert server.seen == []


async def test_a_client_that_says_nothing_more_is_left_without_a_word() -> None:
    server, wire = Echo(), Wire()
    client = ClientConnection(server.handle, set())
    client.connection_made(wire)
    client.data_received(b"GET /wait HTTP/1.1\r\n\r\n")
    await asyncio.sleep(0)
    silent(client, 100 * READ_TIMEOUT_S)
    assert not wire.closed, "it waits for us"
    server.go_on.set()
    assert client.task is not None
    await client.task
    silent(client, READ_TIMEOUT_S / 2)
    assert not wire.closed
    sent = wire.sent
    silent(client, READ_TIMEOUT_S / 2)
    assert wire.closed and wire.sent == sent
    client.connection_lost(None)


async def test_a_body_may_take_long_but_not_pause_for_long() -> None:
    server, wire = Echo(), Wire()
    client = ClientConnection(server.handle, set())
    client.connection_made(wire)
    client.data_received(b"POST / HTTP/1.1\r\nContent-Length: 1000\r\n\r\n")
    for _ in range(5):
        silent(client, READ_TIMEOUT_S * 0.9)
        client.data_received(b"x")
    assert not wire.closed
    silent(client, READ_TIMEOUT_S)
    assert wire.closed and b" 408 " in wire.sent
    client.connection_lost(None)


async def test_a_connection_is_looked_at_as_long_as_it_lasts(echo, monkeypatch) -> None:
    _, port = echo
    monkeypatch.setattr(http_server, "READ_TIMEOUT_S", 0.01)
    assert await exchanged(port) == b""
    wire = Wire()
    client = ClientConnection(Echo().handle, set())
    client.connection_made(wire)
    client.data_received(b"GET /")  # before anybody can look
    async with asyncio.timeout(60):
        while not wire.closed:
            await asyncio.sleep(0.005)
    assert wire.sent.startswith(b"HTTP/1.1 408 ")
    client.connection_lost(None)


async def test_an_answer_waits_for_a_slow_client() -> None:
    server, wire = Echo(), Wire()
    client = ClientConnection(server.handle, set())
    client.connection_made(wire)
    client.pause_writing()
    client.data_received(b"GET /stream HTTP/1.1\r\n\r\n")
    for _ in range(3):
        await asyncio.sleep(0)
    assert wire.sent.endswith(b"2\r\nab\r\n")
    client.resume_writing()
    assert client.task is not None
    await client.task
    assert wire.sent.endswith(b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n")
