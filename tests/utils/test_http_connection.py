"""The client's end of HTTP/1.1, against bytes that a server might send."""

import asyncio
from collections.abc import AsyncIterator, Iterable

import pytest

from slime.utils import http_connection, http_pool
from slime.utils.http_connection import BrokenOff, CannotConnect, HttpConnection
from slime.utils.http_pool import ConnectionPool, Origin
from tests.engines import free_port
from tests.utils.wire import Wire

OK = b"HTTP/1.1 200 OK\r\n"
GET, HEAD = b"GET / HTTP/1.1\r\n\r\n", b"HEAD / HTTP/1.1\r\n\r\n"


def connected() -> tuple[HttpConnection, Wire]:
    connection, wire = HttpConnection(), Wire()
    connection.connection_made(wire)
    return connection, wire


async def answered(pieces: Iterable[bytes], request: bytes = GET, end: bool = False) -> HttpConnection:
    """A connection that was asked and then got these pieces, and the end of the connection."""
    connection, wire = connected()
    connection.send(request)
    assert wire.sent == request
    for piece in pieces:
        connection.data_received(piece)
    if end:
        connection.connection_lost(None)
    return connection


ANSWERS = {
    "length": (OK + b"Content-Length: 3\r\nX-Y: z\r\n\r\nabc", b"abc", True),
    "empty": (OK + b"Content-Length: 0\r\n\r\n", b"", True),
    "chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n2;x=y\r\nbc\r\n0\r\n\r\n", b"abc", True),
    "trailers": (OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nT: v\r\n\r\n", b"abc", True),
    "goes on first": (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 3\r\n\r\nabc", b"abc", True),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
    "closes": (OK + b"Content-Length: 3\r\nConnection: close\r\n\r\nabc", b"abc", False),
    "old": (b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"abc", False),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_is_read_however_it_is_cut(name: str) -> None:
    raw, body, keeps = ANSWERS[name]
    for cut in range(1, len(raw)):
        connection = await answered([raw[:cut], raw[cut:]])
        assert (await connection.read(), connection.reusable) == (body, keeps), cut
    connection = await answered(raw[i : i + 1] for i in range(len(raw)))
    assert b"".join([part async for part in connection.parts()]) == body


async def test_headers_are_found_whatever_their_case() -> None:
    connection = await answered([ANSWERS["length"][0]])
    assert connection.status == 200 and connection.content_length == 3
    assert connection.header(b"x-y") == b"z" and connection.header(b"none") is None


async def test_the_end_of_the_connection_ends_a_body_without_length() -> None:
    connection = await answered([OK + b"\r\nab", b"c"], end=True)
    assert await connection.read() == b"abc" and not connection.reusable


async def test_an_answer_to_head_has_no_body_whatever_it_says() -> None:
    connection = await answered([OK + b"Content-Length: 300\r\n\r\n"], HEAD)
    assert await connection.read() == b"" and connection.content_length == 300
    assert not connection.reusable


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        OK,
        OK + b"Content-Length: 3\r\n\r\nab",
        OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
        OK + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
)
async def test_an_answer_that_ends_too_early_is_none(raw: bytes) -> None:
    connection = await answered([raw], end=True)
    with pytest.raises(BrokenOff, match="the server disconnected"):
        await connection.read()


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        OK + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        OK + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_refused(raw: bytes) -> None:
    connection = await answered([raw])
    with pytest.raises(BrokenOff, match=r"not HTTP/1\.1"):
        await connection.read()
    assert connection._transport.aborted


async def test_a_head_without_end_is_refused() -> None:
    connection = await answered([OK, *[b"X: " + b"y" * 1000 + b"\r\n"] * 100])
    with pytest.raises(BrokenOff, match=f"over {http_connection.HEAD_BYTES} bytes"):
        await connection.read()


@pytest.mark.parametrize("extra", [b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b"HTT"])
async def test_what_nobody_asked_for_ends_the_connection(extra: bytes) -> None:
    raw = ANSWERS["length"][0]
    for pieces in ([raw + extra], [raw, extra]):
        connection = await answered(pieces)
        assert await connection.read() == b"abc" and not connection.reusable


async def test_a_reader_waits_for_no_more_than_it_asked_for() -> None:
    connection, _ = connected()
    asking = asyncio.ensure_future(connection.ask(GET))
    await asyncio.sleep(0)
    connection.data_received(OK + b"Content-Length: 4\r\n\r\n")
    await asking
    parts = connection.parts()
    for part in (b"ab", b"cd"):
        coming = asyncio.ensure_future(anext(parts))
        await asyncio.sleep(0)
        assert not coming.done()
        connection.data_received(part)
        assert await coming == part
    with pytest.raises(StopAsyncIteration):
        await anext(parts)


async def test_a_server_waits_for_a_slow_reader() -> None:
    connection, wire = connected()
    connection.send(GET)
    connection.data_received(OK + b"Content-Length: 1000000\r\n\r\n")
    connection.data_received(b"x" * (http_connection.READ_BUFFER + 1))
    assert wire.paused
    parts = connection.parts()
    assert len(await anext(parts)) == http_connection.READ_BUFFER + 1
    coming = asyncio.ensure_future(anext(parts))
    await asyncio.sleep(0)
    assert not wire.paused
    coming.cancel()


async def test_who_leaves_after_the_last_part_leaves_a_connection_that_goes_on_reading() -> None:
    """Else the next one to use it would wait for ever."""
    size = http_connection.READ_BUFFER + 1
    connection, wire = connected()
    connection.send(GET)
    connection.data_received(OK + b"Content-Length: %d\r\n\r\n" % size + b"x" * size)
    assert wire.paused
    parts = connection.parts()
    assert len(await anext(parts)) == size
    await parts.aclose()  # type: ignore[attr-defined]
    assert connection.reusable and not wire.paused


async def test_what_follows_a_body_is_no_header() -> None:
    connection = await answered([ANSWERS["trailers"][0]])
    assert await connection.read() == b"abc" and connection.header(b"t") is None


@pytest.fixture
async def server() -> AsyncIterator[tuple[Origin, list[asyncio.StreamWriter]]]:
    """Answers each GET with two bytes, and keeps its clients."""
    clients: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clients.append(writer)
        while await reader.readline():
            await reader.readline()
            writer.write(OK + b"Content-Length: 2\r\n\r\n{}")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        yield Origin.of(f"http://127.0.0.1:{port}/generate"), clients
        for writer in clients:
            writer.close()


async def test_a_connection_is_used_again_while_it_is_young(server, monkeypatch) -> None:
    origin, clients = server
    monkeypatch.setattr(http_pool, "KEEPALIVE_S", 3600.0)
    pool = ConnectionPool(120.0)
    for _ in range(3):
        connection = await pool.take(origin)
        await connection.ask(GET)
        assert await connection.read() == b"{}"
        pool.give_back(origin, connection)
    assert len(clients) == 1
    monkeypatch.setattr(http_pool, "KEEPALIVE_S", 0.0)
    assert await pool.take(origin) is not connection
    pool.close()


async def test_idle_connections_do_not_pile_up(server, monkeypatch) -> None:
    monkeypatch.setattr(http_pool, "KEEPALIVE_S", 0.01)
    origin, _ = server
    pool = ConnectionPool(120.0)
    connections = [await pool.take(origin) for _ in range(3)]
    for connection in connections:
        await connection.ask(GET)
        await connection.read()
        pool.give_back(origin, connection)
    async with asyncio.timeout(60):
        while pool._idle:
            await asyncio.sleep(0.005)
    assert not any(connection.reusable for connection in connections)


async def test_no_connection_says_why() -> None:
    port = free_port()
    with pytest.raises(CannotConnect, match=str(port)):
        await ConnectionPool(120.0).take(Origin.of(f"http://127.0.0.1:{port}"))


@pytest.mark.parametrize("url", ["10.0.0.1:80", "ftp://host/x", "http://", "/generate"])
def test_what_names_no_server_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="wanted: http://host:port"):
        Origin.of(url)


def test_origins_by_their_urls() -> None:
    assert Origin.of("http://u:p@[::1]:80/x?y") == Origin("::1", 80, False, "[::1]:80")
    assert Origin.of("https://host") == Origin("host", 443, True, "host")
