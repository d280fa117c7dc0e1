"""Abort, pause, continue, flush, release and resume."""

import asyncio
import math
import time

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.http.bodies import AbortBody, PauseBody, TagsBody, read_body
from slime.backends.embedded_engine.http.generate_routes import json_response
from slime.backends.embedded_engine.http.state import state_of

router = APIRouter()
_POLL_SECONDS = 0.05


@router.post("/abort_request")
async def abort_request(request: Request) -> Response:
    body = await read_body(request, AbortBody)
    engine = state_of(request).engine
    if body.rid or body.abort_all:
        await engine.run(lambda: engine.abort(body.rid or "", body.abort_all))
    return Response(status_code=200)


@router.post("/pause_generation")
async def pause_generation(request: Request) -> Response:
    body = await read_body(request, PauseBody)
    engine = state_of(request).engine
    await engine.run(lambda: engine.pause(body.mode))
    return json_response({"message": "Generation paused successfully.", "status": "ok"})


@router.post("/continue_generation")
async def continue_generation(request: Request) -> Response:
    engine = state_of(request).engine
    await engine.run(engine.resume)
    return json_response({"message": "Generation continued successfully.", "status": "ok"})


@router.api_route("/flush_cache", methods=["GET", "POST"])
async def flush_cache(request: Request) -> Response:
    """Waits up to the query parameter ``timeout`` (seconds, 0) for the engine to become idle."""
    try:
        timeout = float(request.query_params.get("timeout", 0.0))
    except ValueError as error:
        raise BadRequest(f"timeout: {error}") from error
    if not math.isfinite(timeout) or timeout < 0:
        raise BadRequest(f"timeout {timeout}: wanted seconds, at least 0")
    engine = state_of(request).engine
    deadline = time.monotonic() + timeout
    while not await engine.run(engine.flush):
        if time.monotonic() >= deadline:
            return PlainTextResponse("Flush cache failed.\n", 400)
        await asyncio.sleep(_POLL_SECONDS)
    return PlainTextResponse("Cache flushed.\n")


@router.api_route("/release_memory_occupation", methods=["GET", "POST"])
async def release_memory_occupation(request: Request) -> Response:
    body = await read_body(request, TagsBody)
    state = state_of(request)
    await state.engine.run(lambda: state.memory.release(body.tags))
    return json_response(None)


@router.api_route("/resume_memory_occupation", methods=["GET", "POST"])
async def resume_memory_occupation(request: Request) -> Response:
    body = await read_body(request, TagsBody)
    state = state_of(request)
    await state.engine.run(lambda: state.memory.resume(body.tags))
    return json_response(None)
