"""Assembles the FastAPI application."""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.http import (
    control_routes,
    generate_routes,
    info_routes,
    openai_routes,
    parsing_routes,
    weight_routes,
)
from slime.backends.embedded_engine.http.auth import ApiKeyMiddleware
from slime.backends.embedded_engine.http.bodies import MAX_WEIGHTS_BYTES
from slime.backends.embedded_engine.http.generate_routes import json_response
from slime.backends.embedded_engine.http.running import ClientGone
from slime.backends.embedded_engine.http.state import ServerState
from slime.utils.request_gate import RequestGate

logger = logging.getLogger(__name__)


def create_app(state: ServerState) -> FastAPI:
    app = FastAPI(title="SGLang-compatible embedded engine", docs_url=None, redoc_url=None)
    app.state.server = state
    routes = (generate_routes, openai_routes, parsing_routes, control_routes, weight_routes, info_routes)
    for module in routes:
        app.include_router(module.router)
    app.add_exception_handler(BadRequest, _bad_request)
    for gone in (ClientGone, ClientDisconnect):
        app.add_exception_handler(gone, _client_gone)
    app.add_exception_handler(Exception, _server_error)
    # The key is looked at first: what is added last comes before the others.
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
