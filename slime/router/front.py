"""What the router does with a request: as few steps as possible between a client and a worker."""

import hmac
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol
from urllib.parse import parse_qsl

import orjson

from slime.router.admin import OPEN_PATHS, AdminRequest, AdminServer, is_own
from slime.router.halves import Reply
from slime.router.http_server import ClientConnection, RawHeaders, Request
from slime.router.metrics import Counts
from slime.router.upstream import RefusedError, Upstream, end_to_end
from slime.utils.same_site import FOREIGN, is_foreign

WHOLE_BYTES = 2**20
"""Answers up to this length are handed on in one piece, others as they come."""
NO_TREE = (
    "no radix tree (wanted: --slime-router-middleware-paths "
    "slime.router.middleware_hub.radix_tree_middleware.RadixTreeMiddleware)"
)


class Client(Protocol):
    """Who gets an answer: a connection, or middleware."""

    status: int
    """The status of the answer; 0 before it has begun."""

    @property
    def expects_body(self) -> bool: ...

    def respond(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None: ...

    def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]], length: int | None) -> None: ...

    async def write(self, part: bytes) -> None: ...

    def end(self) -> None: ...

    def abort(self) -> None: ...


class Front:
    """Handles requests.

    Args:
        api_key: that clients have to show; None for none.
        host: on which the server listens.
        middleware: answers in place of this, and may ask ``answer`` in turn; None without.
        tree: returns the tree that answers ``/retrieve_from_text``; None without.
    """

    def __init__(
        self,
        upstream: Upstream,
        admin: AdminServer,
        counts: Counts,
        api_key: str | None,
        host: str,
        middleware: Callable[[Request, ClientConnection], Awaitable[None]] | None = None,
        tree: Callable[[], Any] = lambda: None,
    ) -> None:
        self._upstream, self._admin, self._counts = upstream, admin, counts
        self._api_key, self._host = api_key, host
        self._middleware, self._tree = middleware, tree

    def admits(self, target: bytes, headers: RawHeaders) -> bool:
        """Whether the body of a request is worth keeping: not without the key."""
        shown = next((value for name, value in headers if name.lower() == b"authorization"), b"")
        return is_allowed(self._api_key, target.partition(b"?")[0].decode("latin-1"), shown)

    async def handle(self, request: Request, client: ClientConnection) -> None:
        """Answers one request of a client, or refuses it."""
        path = _path_of(request)
        host, origin = (request.header(name).decode("latin-1") for name in (b"host", b"origin"))
        if not is_allowed(self._api_key, path, request.header(b"authorization")):
            _respond_json(client, 401, {"error": "Unauthorized"})
        elif is_foreign(host, origin, self._host):
            _respond_json(client, 403, FOREIGN)
        elif self._middleware is not None:
            await self._middleware(request, client)
        else:
            await self.answer(request, client)

    async def answer(self, request: Request, client: Client) -> None:
        """Answers a request that nothing is wrong with."""
        path = _path_of(request)
        if is_own(path):
            await self._answer_itself(request, path, client)
        elif path == "/retrieve_from_text":
            _retrieve(self._tree(), request, client)
        else:
            await self._forward(request, client)
            self._counts[f"requests/{client.status}"] += 1

    async def _answer_itself(self, request: Request, path: str, client: Client) -> None:
        query = request.target.partition(b"?")[2].decode("latin-1")
        asked = dict(parse_qsl(query, keep_blank_values=True))
        body = request.body.decode(errors="replace")
        answer = await self._admin.answer(AdminRequest(request.method.decode(), path, asked, body))
        client.respond(answer.status, [(b"Content-Type", answer.content_type.encode())], answer.content)

    async def _forward(self, request: Request, client: Client) -> None:
        try:
            asked = self._upstream.answer(request.method, request.target, request.headers, request.body)
            async with asked as reply:
                await _deliver(reply, client)
        except RefusedError as error:
            if client.status:
                client.abort()
            else:
                _respond_json(client, error.status, error.body)


async def _deliver(reply: Reply, client: Client) -> None:
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


def _path_of(request: Request) -> str:
    return request.target.partition(b"?")[0].decode("latin-1")


def _retrieve(tree: Any, request: Request, client: Client) -> None:
    if tree is None:
        _respond_error(client, 404, "no_radix_tree", NO_TREE)
    elif request.method != b"POST":
        _respond_error(client, 405, "method_not_allowed", "(wanted: POST)")
    else:
        try:
            _respond_json(client, 200, retrieved(tree, **orjson.loads(request.body)))
        except (ValueError, TypeError) as error:
            _respond_error(client, 400, "bad_request", f"{error} (wanted: {{text, prompt_characters}})")


def retrieved(tree: Any, text: str, prompt_characters: int | None = None) -> dict[str, Any]:
    """Returns the answer of ``/retrieve_from_text``.

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


def _respond_error(client: Client, status: int, kind: str, message: str) -> None:
    _respond_json(client, status, {"error": {"type": kind, "code": kind, "message": message}})


def _respond_json(client: Client, status: int, body: object) -> None:
    client.respond(status, [(b"Content-Type", b"application/json")], orjson.dumps(body))
