"""Low-rank adapters by request: loaded from the tensors of a body, and forgotten."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from fastapi import APIRouter, Request
from fastapi.responses import Response

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.http.bodies import (
    MAX_WEIGHTS_BYTES,
    LoadAdapterBody,
    UnloadAdapterBody,
    read_body,
)
from slime.backends.embedded_engine.http.generate_routes import json_response
from slime.backends.embedded_engine.http.state import ServerState, state_of
from slime.utils.tensor_bucket import tensor_sha256

router = APIRouter()
FROM_TENSORS = "__tensor__"
"""What SGLang calls the path of an adapter that came in a request."""


@router.post("/load_lora_adapter_from_tensors")
async def load_adapter(request: Request) -> Response:
    """Requests that name it may come once this is answered; those before keep what they have."""
    body = await read_body(request, LoadAdapterBody, MAX_WEIGHTS_BYTES)
    state = state_of(request)

    def load() -> None:
        adapters = state.engine.scheduler.adapters
        adapters.require_enabled()
        adapters.load(body.lora_name, _tensors(state, body), body.config_dict)

    return await _answer(state, load)


@router.post("/unload_lora_adapter")
async def unload_adapter(request: Request) -> Response:
    """Does not wait for requests under way, as SGLang does: they keep the adapter that they began with."""
    body = await read_body(request, UnloadAdapterBody)
    state = state_of(request)
    return await _answer(state, lambda: state.engine.scheduler.adapters.unload(body.lora_name))


async def _answer(state: ServerState, change: Callable[[], None]) -> Response:
    error: BadRequest | None = None
    try:
        await state.engine.run(change)
    except BadRequest as refusal:
        error = refusal
    content = {
        "rid": None,
        "http_worker_ipc": None,
        "success": error is None,
        "error_message": "" if error is None else str(error),
        "loaded_adapters": dict.fromkeys(state.engine.scheduler.adapters.names, FROM_TENSORS),
    }
    return json_response(content, 200 if error is None else error.status)


def _tensors(state: ServerState, body: LoadAdapterBody) -> dict[str, torch.Tensor]:
    """The tensors of all tensor-parallel ranks.

    Raises:
        BadRequest: they are none, or others than were announced.
    """
    tensors = dict(state.updater.of_ranks(body.serialized_named_tensors, body.load_format))
    if body.expected_checksums is not None:
        _require_as_sent(tensors, body.expected_checksums)
    return tensors


def _require_as_sent(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, Any]) -> None:
    found = {name: tensor_sha256(tensor) for name, tensor in tensors.items()}
    wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
    if wrong:
        raise BadRequest(f"adapter: {len(wrong)} tensors are not those of expected_checksums: {wrong[:5]}")
