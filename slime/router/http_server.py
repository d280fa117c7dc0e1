"""An HTTP/1.1 server for one who passes on what he gets: whole requests in, answers out as they come.

httptools, which is llhttp, parses. Bodies stay as they are. A client's requests are handled one after the
other; when it goes away, its handler is cancelled.
"""

import asyncio
import logging
import math
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus

import httptools

from slime.utils.http_connection import HEAD_BYTES

logger = logging.getLogger(__name__)

RawHeaders = list[tuple[bytes, bytes]]
_PHRASES = {int(status): status.phrase.encode() for status in HTTPStatus}
_WITHOUT_BODY = (204, 304)
BODY_BYTES = 2**28
"""The longest body of a request. Of one that is not admitted nothing is kept."""
_TOO_LONG = (413, f"the body of the request has over {BODY_BYTES} bytes")
_UNPAID_BYTES = HEAD_BYTES + 2**18
"""What may come after a head without being part of a body: of chunks and trailers, which nobody reads."""
READ_TIMEOUT_S = 60.0
"""How long the head of a request may take, from connecting or the answer before; a body may pause as long."""


@dataclass(frozen=True, slots=True)
class Request:
    """A whole request.

    Attributes:
        target: path and query, as the client wrote them.
        keeps: whether the client wants the connection for another one.
        knows_chunks: whether it can read a body in chunks, which HTTP/1.0 had not.
    """

    method: bytes
    target: bytes
    headers: RawHeaders
    body: bytes
    keeps: bool
    knows_chunks: bool

    def header(self, name: bytes) -> bytes:
        """The first of this name, which is in lower case; empty without."""
        return next((value for key, value in self.headers if key.lower() == name), b"")


class ClientConnection(asyncio.Protocol):
    """One client, and the answer to its request at hand.

    Args:
        handle: answers a request, by ``respond``, or by ``begin``, ``write`` and ``end``.
        connections: all of the server; this one is in it as long as it lasts.
        admits: whether the body of a request is worth keeping, by target and headers.
        most: connections at a time; a further one takes the place of whoever has been idle or slow longest.

    Attributes:
        status: of the answer; 0 before it has begun.
        task: the running handler.
    """

    def __init__(
        self,
        handle: Callable[[Request, "ClientConnection"], Awaitable[None]],
        connections: set["ClientConnection"],
        admits: Callable[[bytes, RawHeaders], bool] = lambda target, headers: True,
        most: float = math.inf,
    ) -> None:
        self._handle, self._connections = handle, connections
        self._admits, self._most = admits, most
        self._kept = True
        self._body_bytes = self._unpaid = 0
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._waiting: deque[Request] = deque()
        self._request: Request
        self._chunked = self._held = False
        self._full: asyncio.Future[None] | None = None
        self._head_bytes = 0
        self._in_body = False
        self._fault: tuple[int, str] | None = None  # of what came after the requests that wait
        self._since = self._loop.time()  # when this client was last waited for anew
        self._watch: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None
        self.status = 0

    # What a handler does.

    @property
    def peer(self) -> tuple[str, int] | None:
        """Address and port of the client."""
        address = self._transport.get_extra_info("peername")
        return (address[0], address[1]) if address else None

    @property
    def expects_body(self) -> bool:
        """Whether an answer to the request may have one."""
        return self._request.method != b"HEAD"

    def respond(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        """The whole answer."""
        length = None if status in _WITHOUT_BODY else len(body)
        self._begin(status, headers, length, body if length and self.expects_body else b"")
        self.end()

    def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]], length: int | None) -> None:
        """The head; the body follows, in chunks where its length is not known.

        For a client that knows no chunks the end of the connection is the end of the body.
        """
        open_ended = length is None and status not in _WITHOUT_BODY and self.expects_body
        self._chunked = open_ended and self._request.knows_chunks
        if self._chunked:
            headers = [*headers, (b"Transfer-Encoding", b"chunked")]
        self._begin(status, headers, length, b"")

    async def write(self, part: bytes) -> None:
        """Waits while the client is slower."""
        if not part or not self.expects_body:
            return  # a chunk without bytes would be the last one
        self._transport.write(b"%x\r\n%b\r\n" % (len(part), part) if self._chunked else part)
        if self._full is not None:
            await self._full

    def end(self) -> None:
        if self._chunked:
            self._chunked = False
            self._transport.write(b"0\r\n\r\n")
        if not self._request.keeps:
            self._transport.close()

    def abort(self) -> None:
        """The client must not take what it has for the whole."""
        self._transport.abort()

    def _begin(
        self, status: int, headers: Iterable[tuple[bytes, bytes]], length: int | None, body: bytes
    ) -> None:
        lines = [b"HTTP/1.1 %d %b" % (status, _PHRASES.get(status, b""))]
        lines += [name + b": " + value for name, value in headers]
        if length is not None:
            lines.append(b"Content-Length: %d" % length)
        if not self._request.keeps:
            lines.append(b"Connection: close")
        self.status = status
        self._transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)

    # What asyncio tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        # One whose machine is gone would be waited for without end.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if len(self._connections) >= self._most and not self._make_room():
            self._refuse(503, f"{len(self._connections)} requests are being answered, and that is the most")
            return
        self._connections.add(self)
        self._watch = self._loop.call_later(READ_TIMEOUT_S, self._look)

    def data_received(self, data: bytes) -> None:
        if self._fault or self._transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._in_body:
            self._since = self._loop.time()
            self._unpaid += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self._fault = self._fault or (400, f"this is not HTTP/1.1: {error}")
        else:
            self._look_at_lengths()
        self._go_on()
        if self._fault and self.task is None:
            self._refuse(*self._fault)

    def _look_at_lengths(self) -> None:
        if self._head_bytes > HEAD_BYTES:
            self._fault = (400, f"the head of the request has over {HEAD_BYTES} bytes")
        elif self._body_bytes > BODY_BYTES:
            self._fault = _TOO_LONG
        elif self._unpaid > _UNPAID_BYTES:
            self._fault = (400, f"over {_UNPAID_BYTES} bytes of the request after its head are not its body")

    def _make_room(self) -> bool:
        """End the connection whose client was last heard of before all others and waits for no answer."""
        idle = [client for client in self._connections if client.task is None]
        if not idle:
            return False
        longest = min(idle, key=lambda client: client._since)
        self._connections.discard(longest)
        longest.abort()
        return True

    def _parse(self, data: bytes) -> None:
        """Ignores wishes for another protocol, as a server may (RFC 9110, section 7.8).

        The parser ends at the head of such a request and leaves its body: another one gets that head again,
        without the wish.
        """
        rest = memoryview(data)
        while True:
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as stop:
                if self._fault:
                    return  # the parser has kept no request
                request = self._waiting.pop()
                if request.method == b"CONNECT":
                    self._fault = (400, "a tunnel is not served")
                    return
                rest = rest[stop.args[0] :]
                self._parser = httptools.HttpRequestParser(self)
                self._parser.feed_data(_head_without_upgrade(request))

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        self._waiting.clear()
        if self._watch is not None:
            self._watch.cancel()
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        self._full = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._full is not None and not self._full.done():
            self._full.set_result(None)
        self._full = None

    # What the parser finds.

    def on_message_begin(self) -> None:
        self._target, self._headers, self._body = b"", RawHeaders(), list[bytes]()

    def on_url(self, part: bytes) -> None:
        self._target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            return  # of a trailer, which must not pass for a header (RFC 9110, section 6.5.1)
        self._headers.append((name, value))
        if name.lower() != b"expect" or value.lower() != b"100-continue" or self.task is not None:
            return
        if self._parser.get_http_version() == "1.1":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_headers_complete(self) -> None:
        self._head_bytes = -(2**62)  # what follows is the body
        self._in_body, self._since = True, self._loop.time()
        self._kept = self._admits(self._target, self._headers)
        self._body_bytes = self._unpaid = 0
        declared = next((value for name, value in self._headers if name.lower() == b"content-length"), b"0")
        if int(declared) > BODY_BYTES:
            self._body_bytes = int(declared)  # refused without waiting for it

    def on_body(self, part: bytes) -> None:
        self._unpaid = 0
        self._body_bytes += len(part)
        if self._kept and self._body_bytes <= BODY_BYTES:
            self._body.append(part)

    def on_message_complete(self) -> None:
        if self._body_bytes > BODY_BYTES:
            self._fault = _TOO_LONG
        if self._fault:
            return  # what follows a fault is not looked at
        parser, body = self._parser, self._body
        whole = body[0] if len(body) == 1 else b"".join(body)
        modern = parser.get_http_version() == "1.1"
        keeps = modern and parser.should_keep_alive()
        self._waiting.append(Request(parser.get_method(), self._target, self._headers, whole, keeps, modern))
        self._head_bytes, self._in_body = 0, False
        self._unpaid = 0

    # One request after the other.

    def _go_on(self) -> None:
        if self.task is None and self._waiting:
            self._request, self.status = self._waiting.popleft(), 0
            self.task = self._loop.create_task(self._serve(self._request))
        if self._waiting and not self._held:
            self._held = True
            self._transport.pause_reading()

    async def _serve(self, request: Request) -> None:
        try:
            await self._handle(request, self)
        except Exception:
            logger.exception("%s %s", request.method, request.target)
            if self.status:
                self.abort()
            else:
                self.respond(500, [], b"")
        self.task, self._since = None, self._loop.time()
        if self._transport.is_closing():
            return
        if self._waiting:
            self._go_on()
        elif self._fault:
            self._refuse(*self._fault)
        elif self._held:
            self._held = False
            self._transport.resume_reading()

    def _look(self) -> None:
        """Ends the connection of a client that says nothing, or so slowly that it never comes to an end.

        Many of these would take all the connections that this process may have ("slowloris").
        """
        now = self._loop.time()
        if self.task is not None:
            self._since = now  # it is the client who waits
        left = self._since + READ_TIMEOUT_S - now
        if left > 0:
            self._watch = self._loop.call_later(left, self._look)
        elif self._head_bytes:
            self._refuse(408, f"the request did not come within {READ_TIMEOUT_S:g} s")
        else:
            self._transport.close()

    def _refuse(self, status: int, why: str) -> None:
        body = why.encode()
        head = b"HTTP/1.1 %d %b\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        self._transport.write(head % (status, _PHRASES[status], len(body)) + body)
        self._transport.close()


def _head_without_upgrade(request: Request) -> bytes:
    """Returns the head of a request without its Upgrade, and without an Expect, which has been answered."""
    version = b"1.1" if request.knows_chunks else b"1.0"
    lines = [b"%b %b HTTP/%b" % (request.method, request.target, version)]
    lines += [b"%b: %b" % pair for pair in request.headers if pair[0].lower() not in (b"upgrade", b"expect")]
    return b"\r\n".join(lines) + b"\r\n\r\n"
