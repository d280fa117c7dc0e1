"""Assembles the FastAPI application, and asks for API keys before its routes."""

import hmac
import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.http import (
    adapter_routes,
    control_routes,
    generate_routes,
    info_routes,
    openai_routes,
    parsing_routes,
    session_routes,
    weight_routes,
)
from slime.backends.embedded_engine.http.bodies import MAX_WEIGHTS_BYTES
from slime.backends.embedded_engine.http.generate_routes import json_response
from slime.backends.embedded_engine.http.running import ClientGone
from slime.backends.embedded_engine.http.state import ServerState
from slime.backends.embedded_engine.http.writers import WriterGate
from slime.utils.request_gate import RequestGate

logger = logging.getLogger(__name__)

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


def create_app(state: ServerState) -> FastAPI:
    app = FastAPI(title="SGLang-compatible embedded engine", docs_url=None, redoc_url=None)
    app.state.server = state
    # A path is compared with those before it: engines stand still for some requests, others generate.
    standing_still = (control_routes, weight_routes, session_routes)
    others = (openai_routes, parsing_routes, info_routes, adapter_routes)
    for module in (generate_routes, *standing_still, *others):
        app.include_router(module.router)
    app.add_exception_handler(BadRequest, _bad_request)
    for gone in (ClientGone, ClientDisconnect):
        app.add_exception_handler(gone, _client_gone)
    app.add_exception_handler(Exception, _server_error)
    # The key is looked at first: what is added last comes before the others.
    app.add_middleware(WriterGate, fence=state.engine.fence)
    app.add_middleware(RequestGate, host=state.args.host, most_bytes=MAX_WEIGHTS_BYTES)
    if state.args.api_key or state.args.admin_api_key:
        app.add_middleware(
            ApiKeyMiddleware, api_key=state.args.api_key, admin_api_key=state.args.admin_api_key
        )
    return app


def error_body(path: str, error: BadRequest) -> dict[str, Any]:
    """``/generate`` and the other endpoints phrase errors differently, as in SGLang."""
    if path == "/generate" and error.kind == BadRequest.CONTRACT:
        return {"error": str(error)}
    if path == "/generate" and error.kind != BadRequest.BODY:
        return {"error": {"message": str(error)}}
    kind = BadRequest.VALUE if error.kind == BadRequest.CONTRACT else error.kind
    return {"object": "error", "message": str(error), "type": kind, "param": None, "code": error.status}


async def _bad_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, BadRequest)
    return json_response(error_body(request.url.path, error), error.status)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _server_error(request: Request, error: Exception) -> Response:
    logger.exception("%s failed", request.url.path, exc_info=error)
    answer = json_response({"error": {"message": repr(error)}}, 500)
    # the connection does not survive an exception: unless told, the client would send its next request on it
    answer.headers["Connection"] = "close"
    return answer


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
