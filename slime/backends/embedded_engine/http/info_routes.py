"""Health, and what the server is and does."""

import asyncio
import dataclasses
import os
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.http.adapter_routes import FROM_TENSORS
from slime.backends.embedded_engine.http.generate_routes import json_response
from slime.backends.embedded_engine.http.state import ServerState, state_of

router = APIRouter()
VERSION = "0.5.23"
_POLL_SECONDS = 0.1


@router.get("/health")
@router.get("/health_generate")
async def health(request: Request) -> Response:
    """200 if the engine can generate. Behind a pause it cannot, and after SGLang's 20 s that is a 503."""
    engine = state_of(request).engine
    if request.url.path == "/health" and not _health_generates():
        return Response(status_code=200)
    try:
        async with asyncio.timeout(float(os.environ.get("SGLANG_HEALTH_CHECK_TIMEOUT", "20"))):
            while not await engine.run(lambda: engine.paused is None and not engine.updating):
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        return Response(status_code=503)
    return Response(status_code=200)


def _health_generates() -> bool:
    value = os.environ.get("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "true")
    return value.lower() not in ("false", "0", "no", "n", "f")


@router.get("/ready")
async def ready(request: Request) -> Response:
    engine = state_of(request).engine
    generates = engine.alive and engine.paused is None and not engine.updating
    return Response(status_code=200 if generates else 503)


@router.get("/model_info")
@router.get("/get_model_info")
async def model_info(request: Request) -> Response:
    state = state_of(request)
    return json_response(
        {
            "model_path": state.model_path,
            "served_model_name": state.served_model_name,
            "tokenizer_path": state.args.tokenizer_path or state.args.model_path,
            "is_generation": True,
            "weight_version": state.engine.scheduler.weight_version,
            "load_format": state.args.load_format,
            "model_type": state.config.shape.model_type,
            "architectures": list(state.config.architectures),
            "has_image_understanding": False,
            "has_audio_understanding": False,
        }
    )


@router.get("/server_info")
@router.get("/get_server_info")
async def server_info(request: Request) -> Response:
    """Asks the engine thread too, so that an answer says that it lives, even behind a pause."""
    state = state_of(request)
    await state.engine.run(lambda: None)
    arguments = {k: v for k, v in dataclasses.asdict(state.args).items() if not k.endswith("api_key")}
    resolved = {
        "context_length": state.context_length,
        "max_running_requests": state.max_running_requests,
        "max_total_num_tokens": state.max_total_tokens,
        "dp_size": 1,
        "pp_size": 1,
        "disaggregation_mode": "null",
        "version": VERSION,
        "frontend": "embedded_engine",
        "startup_time": state.started_at,
    }
    internal = {
        "last_gen_throughput": state.engine.last_step_throughput,
        "effective_max_running_requests_per_dp": state.max_running_requests,
        "weight_version": state.engine.scheduler.weight_version,
    }
    return json_response({**arguments, **resolved, "internal_states": [internal]})


def load_of(state: ServerState) -> dict[str, Any]:
    """Counts of one moment; they may be off by a step while the engine runs."""
    scheduler = state.engine.scheduler
    used = sum(s.length for s in list(scheduler.running))
    return {
        "dp_rank": 0,
        "num_running_reqs": len(scheduler.running) + (scheduler.partial is not None),
        "num_waiting_reqs": len(scheduler.waiting),
        "num_used_tokens": used,
        "max_total_num_tokens": state.max_total_tokens,
        "token_usage": used / state.max_total_tokens,
        "gen_throughput": state.engine.last_step_throughput,
        "max_running_requests": state.max_running_requests,
    }


@router.get("/v1/loads")
async def loads(request: Request) -> Response:
    load = load_of(state_of(request))
    load["num_total_reqs"] = load["num_running_reqs"] + load["num_waiting_reqs"]
    return json_response({"timestamp": datetime.now(UTC).isoformat(), "version": VERSION, "loads": [load]})


@router.get("/v1/models")
async def models(request: Request) -> Response:
    state = state_of(request)
    return json_response({"object": "list", "data": [_model_card(state), *_adapter_cards(state)]})


@router.get("/v1/models/{model_id:path}")
async def model(request: Request, model_id: str) -> Response:
    state = state_of(request)
    if model_id != state.served_model_name:
        raise BadRequest(f"The model '{model_id}' does not exist", 404)
    return json_response(_model_card(state))


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text, under ``--enable-metrics``."""
    state = state_of(request)
    if not state.args.enable_metrics:
        raise BadRequest("metrics are off (wanted: --enable-metrics)", 404)
    names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "token_usage", "gen_throughput")
    load = load_of(state)
    lines = [f"# TYPE sglang:{name} gauge\nsglang:{name} {load[name]}" for name in names]
    total = state.engine.scheduler.generated_tokens
    lines.append(f"# TYPE sglang:generation_tokens_total counter\nsglang:generation_tokens_total {total}")
    return PlainTextResponse("\n".join(lines) + "\n")


def _adapter_cards(state: ServerState) -> list[dict[str, Any]]:
    own = {"root": FROM_TENSORS, "parent": state.served_model_name, "max_model_len": None}
    return [{**_model_card(state), "id": name, **own} for name in state.engine.scheduler.adapters.names]


def _model_card(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.served_model_name,
        "object": "model",
        "created": int(state.started_at),
        "owned_by": "sglang",
        "root": state.served_model_name,
        "parent": None,
        "max_model_len": state.context_length,
    }
