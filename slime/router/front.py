"""The router without middleware: as few steps as possible between a client and a worker."""

import hmac
from urllib.parse import parse_qsl

import orjson

from slime.router.admin import OPEN_PATHS, AdminRequest, AdminServer, is_own
from slime.router.http_server import ClientConnection, RawHeaders, Request
from slime.router.metrics import Counts
from slime.router.upstream import RefusedError, Upstream, end_to_end
from slime.utils.http_connection import HttpConnection
from slime.utils.same_site import FOREIGN, is_foreign

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
        host: on which the server listens.
    """

    def __init__(
        self, upstream: Upstream, admin: AdminServer, counts: Counts, api_key: str | None, host: str
    ) -> None:
        self._upstream, self._admin, self._counts = upstream, admin, counts
        self._api_key, self._host = api_key, host

    def admits(self, target: bytes, headers: RawHeaders) -> bool:
        """Whether the body of a request is worth keeping: not without the key."""
        shown = next((value for name, value in headers if name.lower() == b"authorization"), b"")
        return is_allowed(self._api_key, target.partition(b"?")[0].decode("latin-1"), shown)

    async def handle(self, request: Request, client: ClientConnection) -> None:
        """Answers one request of a client."""
        raw_path, _, query = request.target.partition(b"?")
        path = raw_path.decode("latin-1")
        host, origin = (request.header(name).decode("latin-1") for name in (b"host", b"origin"))
        if not is_allowed(self._api_key, path, request.header(b"authorization")):
            _respond_json(client, 401, {"error": "Unauthorized"})
        elif is_foreign(host, origin, self._host):
            _respond_json(client, 403, FOREIGN)
        elif is_own(path):
            await self._answer_itself(request, path, query, client)
        elif path == "/retrieve_from_text":
            _respond_json(client, 404, {"error": {"type": "no_radix_tree", "message": NO_TREE}})
        else:
            await self._forward(request, client)
            self._counts[f"requests/{client.status}"] += 1

    async def _answer_itself(
        self, request: Request, path: str, query: bytes, client: ClientConnection
    ) -> None:
        asked = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
        body = request.body.decode(errors="replace")
        answer = await self._admin.answer(AdminRequest(request.method.decode(), path, asked, body))
        client.respond(answer.status, [(b"Content-Type", answer.content_type.encode())], answer.content)

    async def _forward(self, request: Request, client: ClientConnection) -> None:
        try:
            asked = self._upstream.answer(request.method, request.target, request.headers, request.body)
            async with asked as reply:
                await _deliver(reply, client)
        except RefusedError as error:
            if client.status:
                client.abort()
            else:
                _respond_json(client, error.status, error.body)


async def _deliver(reply: HttpConnection, client: ClientConnection) -> None:
    headers, length = end_to_end(reply.headers), reply.content_length
    if length is not None and length <= WHOLE_BYTES and client.expects_body:
        client.respond(reply.status, headers, await reply.read())
        return
    client.begin(reply.status, headers, length)
    async for part in reply.parts():
        await client.write(part)
    client.end()


def is_allowed(api_key: str | None, path: str, shown: bytes) -> bool:
    """Whether a request shows the key in ``Authorization``, or needs none."""
    if api_key is None or path in OPEN_PATHS:
        return True
    return hmac.compare_digest(shown, f"Bearer {api_key}".encode())


def _respond_json(client: ClientConnection, status: int, body: object) -> None:
    client.respond(status, [(b"Content-Type", b"application/json")], orjson.dumps(body))
