"""Assembles the FastAPI application."""

import logging

from fastapi import FastAPI, Request
from fastapi.responses import Response

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.http import (
    control_routes,
    generate_routes,
    info_routes,
    openai_routes,
    weight_routes,
)
from slime.backends.embedded_engine.http.auth import ApiKeyMiddleware
from slime.backends.embedded_engine.http.generate_routes import json_response
from slime.backends.embedded_engine.http.running import ClientGone
from slime.backends.embedded_engine.http.state import ServerState

logger = logging.getLogger(__name__)


def create_app(state: ServerState) -> FastAPI:
    app = FastAPI(title="SGLang-compatible embedded engine", docs_url=None, redoc_url=None)
    app.state.server = state
    for module in (generate_routes, openai_routes, control_routes, weight_routes, info_routes):
        app.include_router(module.router)
    app.add_exception_handler(BadRequest, _bad_request)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(Exception, _server_error)
    if state.args.api_key or state.args.admin_api_key:
        app.add_middleware(
            ApiKeyMiddleware, api_key=state.args.api_key, admin_api_key=state.args.admin_api_key
        )
    return app


async def _bad_request(request: Request, error: Exception) -> Response:
    """``/generate`` and the control endpoints phrase errors differently, and so does SGLang."""
    assert isinstance(error, BadRequest)
    if request.url.path == "/generate":
        return json_response({"error": str(error)}, error.status)
    return json_response(
        {
            "object": "error",
            "message": str(error),
            "type": "BadRequestError",
            "param": None,
            "code": error.status,
        },
        error.status,
    )


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _server_error(request: Request, error: Exception) -> Response:
    logger.exception("%s failed", request.url.path, exc_info=error)
    return json_response({"error": {"message": repr(error)}}, 500)
