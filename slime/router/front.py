"""The server without middleware: as few steps as possible between a client and a worker."""

import asyncio
import hmac
from collections.abc import Mapping

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler

from slime.router.admin import OPEN_PATHS, AdminRequest, AdminServer, is_own
from slime.router.connections import HEADER_BYTES, Reply
from slime.router.metrics import Counts
from slime.router.upstream import RefusedError, Upstream, end_to_end

WHOLE_BYTES = 2**20
"""Answers up to this length are handed on in one piece, others as they come."""
NO_TREE = (
    "no radix tree (wanted: --slime-router-middleware-paths "
    "slime.router.middleware_hub.radix_tree_middleware.RadixTreeMiddleware)"
)


class Front:
    """Handles requests.

    Args:
        api_key: that clients have to show; None for none.
    """

    def __init__(self, upstream: Upstream, admin: AdminServer, counts: Counts, api_key: str | None) -> None:
        self._upstream, self._admin, self._counts, self._api_key = upstream, admin, counts, api_key

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.rel_url.raw_path
        if not is_allowed(self._api_key, path, request.headers):
            return _json(401, {"error": "Unauthorized"})
        if is_own(path):
            body = (await request.read()).decode(errors="replace")
            answer = await self._admin.answer(AdminRequest(request.method, path, dict(request.query), body))
            return web.Response(status=answer.status, body=answer.content, content_type=answer.content_type)
        if path == "/retrieve_from_text":
            return _json(404, {"error": {"type": "no_radix_tree", "message": NO_TREE}})
        response = await self._forward(request)
        self._counts[f"requests/{response.status}"] += 1
        return response

    async def _forward(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read() if request.body_exists else b""
        started: list[web.StreamResponse] = []
        try:
            asked = self._upstream.answer(request.method, request.raw_path, request.raw_headers, body)
            async with asked as reply:
                return await self._deliver(request, reply, started)
        except RefusedError as error:
            if not started:
                return _json(error.status, error.body)
            # The client must not take what it has for the whole.
            if request.transport is not None:
                request.transport.abort()
            return started[0]

    async def _deliver(
        self, request: web.BaseRequest, reply: Reply, started: list[web.StreamResponse]
    ) -> web.StreamResponse:
        headers, length = end_to_end(reply.headers), reply.content_length
        if length is not None and length <= WHOLE_BYTES:
            whole = await reply.content.read()
            return web.Response(status=reply.status, reason=reply.reason, headers=headers, body=whole)
        response = web.StreamResponse(status=reply.status, reason=reply.reason, headers=headers)
        response.content_length = length
        started.append(response)
        await response.prepare(request)
        async for chunk in reply.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
        return response


def is_allowed(api_key: str | None, path: str, headers: Mapping[str, str]) -> bool:
    """Whether a request shows the key, or needs none."""
    if api_key is None or path in OPEN_PATHS:
        return True
    shown = headers.get("Authorization", "")
    return hmac.compare_digest(shown.encode(), f"Bearer {api_key}".encode())


def _json(status: int, body: object) -> web.Response:
    return web.json_response(body, status=status)


def http_server(front: Front) -> web.Server:
    """A server that leaves bodies compressed, has no limit to them, and stops when the client goes away."""

    def request(
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: RequestHandler,
        writer: AbstractStreamWriter,
        task: "asyncio.Task[None]",
    ) -> web.BaseRequest:
        loop = asyncio.get_running_loop()
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=0)

    return web.Server(
        front.handle,
        request_factory=request,
        handler_cancellation=True,
        auto_decompress=False,
        access_log=None,
        max_line_size=HEADER_BYTES,
        max_field_size=HEADER_BYTES,
    )
