"""Trainers say who they are with each request about weights."""

from starlette.types import ASGIApp, Receive, Scope, Send

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.http.generate_routes import json_response
from slime.backends.embedded_engine.weights_fence import WeightsFence, writer
from slime.weight_sync.writer import HEADER

_NAME = HEADER.lower().encode()
TAKE = "/take_weights"


class WriterGate:
    """ASGI middleware: refuses trainers in whose place another one has come.

    The engine thread looks again before it does what they want.
    """

    def __init__(self, app: ASGIApp, fence: WeightsFence) -> None:
        self._app, self._fence = app, fence

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        heads = dict(scope["headers"]) if scope["type"] == "http" and scope["path"] != TAKE else {}
        name = heads.get(_NAME, b"").decode("latin-1") or None
        try:
            self._fence.require(name)
        except BadRequest as error:
            answer = json_response({"success": False, "message": str(error)}, error.status)
            await answer(scope, receive, send)
            return
        token = writer.set(name)
        try:
            await self._app(scope, receive, send)
        finally:
            writer.reset(token)
