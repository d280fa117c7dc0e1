"""Weights that this engine reads out of a trainer's memory; SGLang has nothing like it."""

import base64

from fastapi import APIRouter, Request
from fastapi.responses import Response

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.http.bodies import (
    CloseSessionBody,
    OpenSessionBody,
    UpdateFromSessionBody,
    read_body,
)
from slime.backends.embedded_engine.http.state import state_of
from slime.backends.embedded_engine.http.weight_routes import failure, specs_of, success, update
from slime.weight_sync.remote_memory import RemoteSpan

_MAX_BYTES = 1 << 40
router = APIRouter()


@router.post("/open_weights_session")
async def open_weights_session(request: Request) -> Response:
    body = await read_body(request, OpenSessionBody)
    sessions, engine = state_of(request).updater.sessions, state_of(request).engine
    try:
        metadata = _decoded(body.metadata)
        if not 0 < body.size < _MAX_BYTES:
            raise BadRequest(f"size {body.size}: wanted 1 to {_MAX_BYTES} bytes")
        # The engine thread alone speaks to NIXL.
        await engine.run(lambda: sessions.open(body.session, metadata, body.size, body.within_host))
    except BadRequest as error:
        return failure(error)
    return success("The session is open.")


@router.post("/update_weights_from_session")
async def update_weights_from_session(request: Request) -> Response:
    body = await read_body(request, UpdateFromSessionBody)
    state, specs = state_of(request), specs_of(body)
    source = RemoteSpan(body.address, body.size, body.device, body.kind)
    return await update(
        state,
        False,
        lambda: state.updater.from_session(
            body.session, specs, source, body.weight_version, body.flush_cache
        ),
    )


@router.post("/close_weights_session")
async def close_weights_session(request: Request) -> Response:
    body = await read_body(request, CloseSessionBody)
    state = state_of(request)
    try:
        await state.engine.run(lambda: state.updater.sessions.close(body.session))
    except BadRequest as error:
        return failure(error)
    return success("The session is closed.")


def _decoded(metadata: str) -> bytes:
    try:
        return base64.b64decode(metadata, validate=True)
    except ValueError as error:  # also of characters that are not ASCII
        raise BadRequest(f"metadata: {error}") from error
