"""Between the router's own requests and ASGI, which middleware speaks."""

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol
from urllib.parse import quote, unquote

from starlette.requests import Request as AsgiRequest
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slime.router.front import Front, is_allowed
from slime.router.http_server import BODY_BYTES, ClientConnection, RawHeaders, Request
from slime.utils.request_gate import RequestGate

logger = logging.getLogger(__name__)


class AuthMiddleware:
    """Refuses requests without the key, and those that a page of another site makes a browser send."""

    def __init__(self, app: ASGIApp, *, api_key: str | None, host: str) -> None:
        self._api_key, self._gate = api_key, RequestGate(app, host, BODY_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            shown = AsgiRequest(scope).headers.get("authorization", "").encode("latin-1")
            if not is_allowed(self._api_key, scope["path"], shown):
                await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
                return
        await self._gate(scope, receive, send)


class HasFront(Protocol):
    """A SlimeRouter that is running."""

    front: Front


class FrontApp:
    """The router behind all middleware, as an ASGI application."""

    def __init__(self, router: HasFront) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"{scope['type']}: not served")
        body = await AsgiRequest(scope, receive).body()
        client = _AsgiClient(send, scope["method"])
        await _unless_disconnected(self._answer(_request_of(scope, body), client), receive)

    async def _answer(self, request: Request, client: "_AsgiClient") -> None:
        await self._router.front.answer(request, client)
        await client.flush()
        if client.broken:
            # The client must not take what it has for the whole: its connection ends.
            raise RuntimeError("the engine broke off within its answer")


class _AsgiClient:
    """A client behind ``send``; does what ``slime.router.front.Client`` says."""

    def __init__(self, send: Send, method: str) -> None:
        self._send, self.expects_body = send, method != "HEAD"
        self._waiting: list[Message] = []
        self.status = 0
        self.broken = False

    def respond(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        self.begin(status, headers, len(body))
        self._waiting.append({"type": "http.response.body", "body": body, "more_body": False})

    def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]], length: int | None) -> None:
        raw = [(name.lower(), value) for name, value in headers]
        if length is not None:
            raw.append((b"content-length", b"%d" % length))
        self.status = status
        self._waiting.append({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, part: bytes) -> None:
        self._waiting.append({"type": "http.response.body", "body": part, "more_body": True})
        await self.flush()

    def end(self) -> None:
        self._waiting.append({"type": "http.response.body", "body": b"", "more_body": False})

    def abort(self) -> None:
        self.broken = True

    async def flush(self) -> None:
        while self._waiting:
            await self._send(self._waiting.pop(0))


def _request_of(scope: Scope, body: bytes) -> Request:
    """Returns the request of a scope, under the path that middleware may have given it."""
    raw_path = scope.get("raw_path")
    if raw_path is None or unquote(raw_path.decode("latin-1")) != scope["path"]:
        raw_path = quote(scope["path"]).encode()
    query = scope.get("query_string", b"")
    target = raw_path + b"?" + query if query else raw_path
    return Request(scope["method"].encode(), target, scope["headers"], body, keeps=True, knows_chunks=True)


async def run_app(app: ASGIApp, request: Request, client: ClientConnection) -> None:
    """Has an ASGI application answer a request of a connection.

    Raises:
        RuntimeError: it ended without a whole answer.
    """
    answer = _Answer(client)
    try:
        await app(_scope_of(request, client.peer), _received(request.body), answer.send)
    except Exception:
        if not answer.whole:
            raise
        logger.exception("%s %s, after its answer", request.method, request.target)
    if not answer.whole:
        raise RuntimeError("the middleware returned before its answer was complete")


def _scope_of(request: Request, peer: tuple[str, int] | None) -> Scope:
    raw_path, _, query = request.target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1" if request.knows_chunks else "1.0",
        "method": request.method.decode(),
        "scheme": "http",
        "path": unquote(raw_path.decode("latin-1")),
        "raw_path": raw_path,
        "query_string": query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers],
        "client": peer,
        "server": None,
    }


def _received(body: bytes) -> Receive:
    """A ``receive`` that gives the body once; the end of the connection cancels whoever waits for more."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    return receive


class _Answer:
    """Hands what an application sends to a connection.

    Attributes:
        whole: whether all of it has been handed on.
    """

    def __init__(self, client: ClientConnection) -> None:
        self._client, self._head = client, dict[str, Any]()
        self._missing: int | None = None
        self.whole = False

    async def send(self, message: Message) -> None:
        """
        Raises:
            RuntimeError: the body is not as long as its head says.
        """
        if message["type"] == "http.response.start":
            self._head = dict(message)
        elif message["type"] == "http.response.body":
            await self._send_body(message.get("body", b""), not message.get("more_body", False))

    async def _send_body(self, part: bytes, last: bool) -> None:
        client = self._client
        if self._head:
            headers, length = _parted(self._head["headers"])
            status, self._head = self._head["status"], {}
            if last and client.expects_body:
                client.respond(status, headers, part)
                self.whole = True
                return
            client.begin(status, headers, length)
            self._missing = length if client.expects_body else None
        if self._missing is not None:
            self._missing -= len(part)
            if self._missing < 0 or (last and self._missing):
                raise RuntimeError(f"a body that is {-self._missing} bytes longer than its Content-Length")
        await client.write(part)
        if last:
            client.end()
            self.whole = True


def _parted(headers: Iterable[tuple[bytes, bytes]]) -> tuple[RawHeaders, int | None]:
    """The headers without those of the connection, which are the server's, and the length that they say.

    Raises:
        RuntimeError: a value would be several lines.
    """
    kept, length = RawHeaders(), None
    for name, value in headers:
        if b"\r" in value or b"\n" in value:
            raise RuntimeError(f"the header {name!r} has a line break")
        if name.lower() == b"content-length":
            length = int(value)
        elif name.lower() not in (b"connection", b"transfer-encoding"):
            kept.append((name, value))
    return kept, length


async def _unless_disconnected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Ends the work when the client goes away, so that the worker stops too."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        if not gone.done() or gone.cancelled():
            raise


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
