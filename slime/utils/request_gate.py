"""What is known of a request from its head alone, and decides whether its body is read."""

import hmac

import orjson
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slime.utils.same_site import FOREIGN, is_foreign


class RequestGate:
    """ASGI middleware: nothing of a page of another site or without the key, and no body beyond a bound.

    Args:
        host: the address that the server listens on.
        most_bytes: of a body.
        api_key: that requests have to bring as a bearer token, if there is one.
    """

    def __init__(self, app: ASGIApp, host: str, most_bytes: int, api_key: str | None = None) -> None:
        self._app, self._host, self._most_bytes, self._api_key = app, host, most_bytes, api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        heads = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if is_foreign(heads.get(b"host", ""), heads.get(b"origin", ""), self._host):
            await _refuse(send, 403, FOREIGN)
        elif not self._has_key(heads.get(b"authorization", "")):
            await _refuse(send, 401, {"error": "wrong or missing API key"})
        elif int(heads.get(b"content-length", 0)) > self._most_bytes:
            await _refuse(send, 413, {"error": f"the body of the request has over {self._most_bytes} bytes"})
        else:
            await self._app(scope, self._bounded(receive), send)

    def _has_key(self, shown: str) -> bool:
        return self._api_key is None or hmac.compare_digest(
            shown.encode("latin-1"), f"Bearer {self._api_key}".encode()
        )

    def _bounded(self, receive: Receive) -> Receive:
        """Bounds bodies in chunks, whose length nobody knows before."""
        seen = 0

        async def receive_part() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._most_bytes:
                raise HTTPException(413, f"the body of the request has over {self._most_bytes} bytes")
            return message

        return receive_part


async def _refuse(send: Send, status: int, body: dict[str, str]) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": orjson.dumps(body)})
