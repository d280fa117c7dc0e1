"""The router behind middleware: what ASGI applications it consists of."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol
from urllib.parse import parse_qsl

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from slime.router.admin import AdminRequest, AdminServer, is_own
from slime.router.front import NO_TREE, is_allowed
from slime.router.http_server import BODY_BYTES
from slime.router.metrics import Counts
from slime.router.upstream import RefusedError, Upstream, end_to_end
from slime.utils.http_connection import HttpConnection
from slime.utils.request_gate import RequestGate


class RouterParts(Protocol):
    """The parts of a SlimeRouter that answer requests."""

    upstream: Upstream
    admin: Any
    counts: Counts
    radix_tree: Any


class AuthMiddleware:
    """Lets nobody to the middleware who does not show the key, nor what a page of another site asks for."""

    def __init__(self, app: ASGIApp, *, api_key: str | None, host: str) -> None:
        self._api_key, self._gate = api_key, RequestGate(app, host, BODY_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            shown = Request(scope).headers.get("authorization", "").encode("latin-1")
            if not is_allowed(self._api_key, scope["path"], shown):
                await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
                return
        await self._gate(scope, receive, send)


class ProxyApp:
    """What lies behind all middleware."""

    def __init__(self, router: RouterParts) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"{scope['type']}: not served")
        body = await Request(scope, receive).body()
        answer = await self._own_answer(scope, body)
        if answer is not None:
            await answer(scope, receive, send)
            return
        try:
            await _unless_disconnected(self._proxy(scope, body, send), receive)
        except RefusedError as error:
            self._router.counts[f"requests/{error.status}"] += 1
            await JSONResponse(error.body, error.status)(scope, receive, send)

    async def _own_answer(self, scope: Scope, body: bytes) -> Response | None:
        path = scope["path"]
        if path == "/retrieve_from_text":
            return self._retrieve(scope["method"], body)
        if not is_own(path):
            return None
        query = dict(parse_qsl(scope["query_string"].decode()))
        request = AdminRequest(scope["method"], path, query, body.decode(errors="replace"))
        admin: AdminServer = self._router.admin
        answer = await admin.answer(request)
        return Response(answer.content, answer.status, media_type=answer.content_type)

    def _retrieve(self, method: str, body: bytes) -> Response:
        if self._router.radix_tree is None:
            return _error(404, "no_radix_tree", NO_TREE)
        if method != "POST":
            return _error(405, "method_not_allowed", "(wanted: POST)")
        try:
            request = orjson.loads(body)
            return JSONResponse(retrieved(self._router.radix_tree, **request))
        except (ValueError, TypeError) as error:
            return _error(400, "bad_request", f"{error} (wanted: {{text, prompt_characters}})")

    async def _proxy(self, scope: Scope, body: bytes, send: Send) -> None:
        method, target = scope["method"].encode(), scope.get("raw_path", scope["path"].encode())
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        upstream, counts = self._router.upstream, self._router.counts
        started = False
        try:
            async with upstream.answer(method, target, scope["headers"], body) as reply:
                counts[f"requests/{reply.status}"] += 1
                await send({"type": "http.response.start", "status": reply.status, "headers": _raw(reply)})
                started = True
                async for chunk in reply.parts():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except RefusedError as error:
            if started:
                # The client must not take what it has for the whole: its connection ends.
                raise RuntimeError(str(error)) from error
            raise
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def retrieved(tree: Any, text: str, prompt_characters: int | None = None) -> dict[str, Any]:
    """The answer of ``/retrieve_from_text``.

    Args:
        prompt_characters: if given, the answer says how many tokens lie in so many characters.
    """
    if not isinstance(text, str) or not text:
        raise ValueError(f"text is {text!r}")
    run = tree.whole(text)
    answer: dict[str, Any] = {
        "tokens": run.ids,
        "response": text,
        "loss_mask": run.loss_mask,
        "token_length": len(run),
        "loss_mask_length": len(run),
        "rollout_logp": run.logp,
    }
    if prompt_characters is not None:
        answer["prompt_tokens"] = run.tokens_within(prompt_characters)
    return answer


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


def _raw(reply: HttpConnection) -> list[tuple[bytes, bytes]]:
    headers = [(name.lower(), value) for name, value in end_to_end(reply.headers)]
    length = reply.content_length
    return headers if length is None else [*headers, (b"content-length", b"%d" % length)]


def _error(status: int, kind: str, message: str) -> Response:
    return JSONResponse({"error": {"type": kind, "code": kind, "message": message}}, status)
