"""An HTTP/1.1 server for one who passes on what he gets: whole requests in, answers out as they come.

httptools, which is llhttp, parses. Bodies stay as they are and have no limit. A client's requests are handled
one after the other; when it goes away, its handler is cancelled.
"""

import asyncio
import logging
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


@dataclass(frozen=True, slots=True)
class Request:
    """A whole request.

    Attributes:
        target: path and query, as the client wrote them.
        keeps: whether the client wants the connection for another one.
    """

    method: bytes
    target: bytes
    headers: RawHeaders
    body: bytes
    keeps: bool

    def header(self, name: bytes) -> bytes:
        """The first of this name, which is in lower case; empty without."""
        return next((value for key, value in self.headers if key.lower() == name), b"")


class ClientConnection(asyncio.Protocol):
    """One client, and the answer to its request at hand.

    Args:
        handle: answers a request, by ``respond``, or by ``begin``, ``write`` and ``end``.
        connections: all of the server; this one is in it as long as it lasts.

    Attributes:
        status: of the answer; 0 before it has begun.
        task: the running handler.
    """

    def __init__(
        self,
        handle: Callable[[Request, "ClientConnection"], Awaitable[None]],
        connections: set["ClientConnection"],
    ) -> None:
        self._handle, self._connections = handle, connections
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._waiting: deque[Request] = deque()
        self._request: Request
        self._chunked = self._held = False
        self._full: asyncio.Future[None] | None = None
        self._head_bytes = 0
        self.task: asyncio.Task[None] | None = None
        self.status = 0

    # What a handler does.

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
        """The head; the body follows, in chunks where its length is not known."""
        self._chunked = length is None and status not in _WITHOUT_BODY and self.expects_body
        if self._chunked:
            headers = [*headers, (b"Transfer-Encoding", b"chunked")]
        self._begin(status, headers, length, b"")

    async def write(self, part: bytes) -> None:
        """Waits while the client is slower."""
        if not self.expects_body:
            return
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
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return self._refuse("a change of protocol is not served")
        except httptools.HttpParserError as error:
            return self._refuse(f"this is no HTTP/1.1: {error}")
        if self._head_bytes > HEAD_BYTES:
            return self._refuse(f"the head of the request has over {HEAD_BYTES} bytes")
        self._go_on()

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        self._waiting.clear()
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
        self._headers.append((name, value))
        if name.lower() == b"expect" and value.lower() == b"100-continue" and self.task is None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_headers_complete(self) -> None:
        self._head_bytes = -(2**62)  # what follows is the body

    def on_body(self, part: bytes) -> None:
        self._body.append(part)

    def on_message_complete(self) -> None:
        parser, body = self._parser, self._body
        whole = body[0] if len(body) == 1 else b"".join(body)
        keeps = parser.should_keep_alive() and parser.get_http_version() == "1.1"
        self._waiting.append(Request(parser.get_method(), self._target, self._headers, whole, keeps))
        self._head_bytes = 0

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
        self.task = None
        if self._waiting and not self._transport.is_closing():
            self._go_on()
        elif self._held:
            self._held = False
            self._transport.resume_reading()

    def _refuse(self, why: str) -> None:
        if self.task is None:
            head = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            self._transport.write(head % len(why.encode()) + why.encode())
        self._transport.close()
