"""A request, its answer, and the two ways to ask: an ASGI application itself, or a server at a port."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from urllib.parse import unquote

import h11
from starlette.types import ASGIApp, Message

DEADLINE_S = 60.0
"""In which an answer is whole; the machine may be busy."""
FIELDS_OF_FRAMING = frozenset(
    {b"host", b"content-length", b"transfer-encoding", b"connection", b"expect", b"authorization", b"origin"}
)
"""Headers that are set for each request, and not generated."""
RawHeaders = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class Sent:
    """A request.

    Attributes:
        target: path and query, percent-encoded.
        whole: False for one whose body is announced and held back.
    """

    method: str
    target: str
    headers: RawHeaders = ()
    body: bytes = b""
    whole: bool = True

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    def showing(self, name: bytes, value: bytes) -> "Sent":
        """Returns the request with this header, in place of others of that name."""
        kept = tuple(pair for pair in self.headers if pair[0] != name)
        return replace(self, headers=(*kept, (name, value)))

    def __str__(self) -> str:
        return f"{self.method} {self.target:.200} {self.headers!r:.300} {self.body!r:.300}"


class Answer(NamedTuple):
    """What came of a request.

    Attributes:
        read: whether the server wanted the body.
        failure: why there is no answer; empty if there is one.
    """

    status: int
    headers: RawHeaders = ()
    body: bytes = b""
    read: bool = False
    failure: str = ""


Ask = Callable[[Sent], Awaitable[Answer]]


def asgi(app: ASGIApp, deadline_s: float = DEADLINE_S) -> Ask:
    """A way to ask an ASGI application, as a server of ASGI does for a client of this machine."""

    async def ask(sent: Sent) -> Answer:
        exchange = _Exchange(sent)
        try:
            async with asyncio.timeout(deadline_s):
                await app(exchange.scope, exchange.receive, exchange.send)
        except TimeoutError:
            return Answer(0, read=exchange.read, failure=f"no answer within {deadline_s:g} s")
        except Exception as error:  # what a server of ASGI logs, and makes a 500 of
            return exchange.answer(f"{type(error).__name__}: {error}")
        return exchange.answer("" if exchange.ended else "it returned before its answer was complete")

    return ask


class _Exchange:
    """One request on its way through an application."""

    def __init__(self, sent: Sent) -> None:
        path, _, query = sent.target.partition("?")
        length = ((b"content-length", b"%d" % len(sent.body)),) if sent.body else ()
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": sent.method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(b"host", b"127.0.0.1"), *length, *sent.headers],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        self._sent, self._given = sent, False
        self.read = self.ended = False
        self._status, self._headers, self._parts = 0, (), list[bytes]()

    async def receive(self) -> Message:
        """The body in one piece, and then nothing for as long as the client waits."""
        if self._given or not self._sent.whole:
            self.read = True
            await asyncio.Event().wait()
        self._given, self.read = True, True
        return {"type": "http.request", "body": self._sent.body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], tuple(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self._parts.append(message.get("body", b""))
            self.ended = not message.get("more_body", False)

    def answer(self, failure: str) -> Answer:
        return Answer(self._status, self._headers, b"".join(self._parts), self.read, failure)


class Loopback:
    """Asks a server at a port of this machine, on one connection for as long as the server keeps it."""

    def __init__(self, port: int, deadline_s: float = DEADLINE_S) -> None:
        self._port, self._deadline_s = port, deadline_s
        self._kept: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, sent: Sent) -> Answer:
        """A server that wants a body which is held back gives no answer in time."""
        if not sent.whole:
            self.close()
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._asked(sent)
        except TimeoutError:
            self.close()
            return Answer(0, read=not sent.whole, failure=f"no answer within {self._deadline_s:g} s")
        except (OSError, EOFError, h11.RemoteProtocolError) as error:
            self.close()
            return Answer(0, failure=f"{type(error).__name__}: {error}")

    async def break_off(self, sent: Sent) -> None:
        """Sends a half of a request, and goes."""
        self.close()
        _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        raw = self._raw(sent)
        writer.write(raw[: len(raw) - len(sent.body) // 2 - 1])
        with suppress(OSError):
            await writer.drain()
        writer.close()

    def close(self) -> None:
        if self._kept is not None:
            self._kept[1].close()
            self._kept = None

    def _raw(self, sent: Sent) -> bytes:
        length = b"%d" % len(sent.body)
        heads = ((b"host", b"127.0.0.1:%d" % self._port), (b"content-length", length), *sent.headers)
        lines = b"".join(b"%b: %b\r\n" % pair for pair in heads)
        head = f"{sent.method} {sent.target} HTTP/1.1\r\n".encode() + lines + b"\r\n"
        return head + (sent.body if sent.whole else b"")

    async def _asked(self, sent: Sent) -> Answer:
        while True:
            fresh = self._kept is None
            if self._kept is None:
                self._kept = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                return await self._exchanged(sent, *self._kept)
            except (OSError, EOFError):
                self.close()
                if fresh:
                    raise  # else the server had ended what it kept, as it may

    async def _exchanged(
        self, sent: Sent, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Answer:
        writer.write(self._raw(sent))
        parser = h11.Connection(h11.CLIENT)
        parser.send(h11.Request(method=sent.method, target=b"/", headers=[(b"host", b"x")]))
        parser.send(h11.EndOfMessage())
        status, headers, parts, begun = 0, (), list[bytes](), False
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                piece = await reader.read(2**16)
                if not piece and not begun:
                    raise EOFError("the server closed the connection")
                begun = True
                parser.receive_data(piece)
            elif isinstance(event, h11.Response):
                status, headers = event.status_code, tuple(event.headers)
            elif isinstance(event, h11.Data):
                parts.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                break
        if parser.their_state is not h11.DONE or not sent.whole:
            self.close()
        return Answer(status, headers, b"".join(parts))
