"""API keys: which endpoint asks for which."""

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

_OPEN = ("/health", "/ready", "/metrics")
_NORMAL = (
    "/generate",
    "/model_info",
    "/get_model_info",
    "/server_info",
    "/get_server_info",
    "/v1/",
    "/tokenize",
    "/detokenize",
)
_UNAUTHORIZED = b'{"error":"Unauthorized"}'


class ApiKeyMiddleware:
    """SGLang's rules: normal endpoints take the API key only; control endpoints take the admin key if
    there is one, else the API key; health, readiness and metrics are open."""

    def __init__(self, app: ASGIApp, api_key: str | None, admin_api_key: str | None) -> None:
        self._app = app
        self._api_key = api_key
        self._admin_api_key = admin_api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._allowed(scope):
            await self._app(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": _UNAUTHORIZED})

    def _allowed(self, scope: Scope) -> bool:
        wanted = self._wanted_key(scope["path"])
        if wanted is None or scope["method"] == "OPTIONS":
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, b"Bearer " + wanted.encode())

    def _wanted_key(self, path: str) -> str | None:
        if path.startswith(_OPEN):
            return None
        if path.startswith(_NORMAL):
            return self._api_key
        return self._admin_api_key or self._api_key
