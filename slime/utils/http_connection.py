"""A client's HTTP/1.1 connection, for thousands of requests a second.

httptools, which is llhttp, parses. A request of a general client takes several times the CPU time; here
there is one future to wait for between a request and the end of a short answer.
"""

import asyncio
from collections.abc import AsyncIterator

import httptools

HEAD_BYTES = 2**16
READ_BUFFER = 2**18
"""Bytes kept of an answer that is read part by part; a server that is faster has to wait."""


class CannotConnect(ConnectionError):
    """No connection came about: the server has not seen anything."""


class BrokenOff(ConnectionError):
    """The server ended the connection before its answer was complete, or answered what is not HTTP."""


_HEAD, _PART, _END = range(3)  # of an answer, that somebody waits for


class HttpConnection(asyncio.Protocol):
    """Carries one request after the other; ``ConnectionPool`` makes it.

    Attributes:
        status: of the answer, as are ``headers``; after ``ask``.
        complete: whether all of the answer has arrived.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._lost: ConnectionError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._goal = _HEAD
        self._asked = self._keeps = False
        self._clear()

    def _clear(self) -> None:
        """Clears the state for the next message."""
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = self._has_head = False
        self._parts: list[bytes] = []
        self._head_bytes = self._buffered = 0

    # What a client does.

    @property
    def reusable(self) -> bool:
        """Whether it can carry another request: the last answer was read to its end."""
        return self._keeps and self.complete and not self._parts and self._lost is None

    async def ask(self, request: bytes) -> None:
        """Sends a request and returns when the head of the answer is there.

        Raises:
            ConnectionError: there is none.
        """
        self.send(request)
        await self._until(_HEAD)

    def send(self, request: bytes) -> None:
        """The answer may be waited for later, by ``read`` for instance."""
        if self._lost is not None:
            raise self._lost
        self._clear()
        self._asked, self._keeps = True, not request.startswith(b"HEAD ")
        self._transport.write(request)

    async def read(self) -> bytes:
        """The body, or what was not read of it yet.

        Raises:
            ConnectionError: it broke off.
        """
        self._transport.resume_reading()
        await self._until(_END)
        return self._taken()

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it comes; errors as for ``read``."""
        while True:
            await self._until(_PART)
            if not self._parts:
                return
            yield self._taken()

    def header(self, name: bytes) -> bytes | None:
        """The first of this name, which is in lower case."""
        return next((value for key, value in self.headers if key.lower() == name), None)

    @property
    def content_length(self) -> int | None:
        """The length of the content, as the server said."""
        length = self.header(b"content-length")
        return None if length is None else int(length)

    def close(self) -> None:
        """Ends the server's work, too."""
        self._lost = self._lost or BrokenOff("the connection was closed")
        self._transport.abort()

    # What asyncio tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if not self._has_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            return self._lose(BrokenOff(f"the answer is not HTTP/1.1: {error.__context__ or error}"))
        if not self._has_head and self._head_bytes > HEAD_BYTES:
            return self._lose(BrokenOff(f"the head of the answer has over {HEAD_BYTES} bytes"))
        if self._buffered > READ_BUFFER and self._goal != _END:
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        if error is None and self._lost is None and self._has_head and not self._framed:
            self.complete = True  # the end of the connection is the end of the body
        broken = f"the connection was lost: {error}" if error else "the server disconnected"
        self._lose(error if isinstance(error, ConnectionError) else BrokenOff(broken))

    # What the parser finds.

    def on_message_begin(self) -> None:
        if not self._asked:
            raise ValueError("nothing was asked")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # a trailer must not pass for a header (RFC 9110, section 6.5.1)
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_head = self.status >= 200  # others say only that it goes on
        if self._has_head and not self._keeps:  # HEAD: there is no body, whatever the headers say
            self.complete, self._asked = True, False

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._buffered += len(body)

    def on_message_complete(self) -> None:
        if not self._has_head:
            self._clear()
            return
        self._keeps = self._keeps and self._parser.should_keep_alive()
        self.complete, self._asked = True, False

    # Waiting.

    @property
    def _framed(self) -> bool:
        """Whether the answer says by itself where it ends."""
        codings = [value.lower() for name, value in self.headers if name.lower() == b"transfer-encoding"]
        return any(b"chunked" in coding for coding in codings) or (
            not codings and self.header(b"content-length") is not None
        )

    def _reached(self, goal: int) -> bool:
        if self.complete or goal is _END:
            return self.complete
        return self._has_head if goal is _HEAD else bool(self._parts)

    async def _until(self, goal: int) -> None:
        while not self._reached(goal):
            if self._lost is not None:
                raise self._lost
            self._goal, self._waiter = goal, self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done() and (self._lost or self._reached(self._goal)):
            waiter.set_result(None)

    def _lose(self, error: ConnectionError) -> None:
        self._lost = self._lost or error
        self._transport.abort()
        self._wake()

    def _taken(self) -> bytes:
        """Who takes the last of an answer may not come again: reading goes on now, or never would."""
        self._transport.resume_reading()  # nothing happens if it was not paused
        parts, self._parts, self._buffered = self._parts, [], 0
        return parts[0] if len(parts) == 1 else b"".join(parts)
