"""A server with the few endpoints of an engine that the router and the client need, and no model.

    python tests/backends/sglang_utils/fake_engine.py PORT [API_KEY]

``/generate`` answers with the request's ``input_ids`` reversed and records what it received, which
``/seen`` returns; ``/fake`` sets its state. Anything else is 404, as on an engine too old to know it.
"""

import sys
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response


def make_app(api_key: str | None = None) -> FastAPI:
    app = FastAPI()
    state: dict[str, Any] = {"seen": [], "running": 0, "weight_version": "default", "flush_refusals": 0}

    @app.middleware("http")
    async def check_key(request: Request, call_next: Any) -> Response:
        is_open = request.url.path.startswith("/health")
        if api_key and not is_open and request.headers.get("authorization") != f"Bearer {api_key}":
            return JSONResponse({"error": "Unauthorized"}, status_code=401)
        return await call_next(request)

    @app.get("/health")
    @app.get("/health_generate")
    async def health() -> Response:
        return Response()

    @app.get("/model_info")
    @app.get("/server_info")
    async def info() -> dict[str, Any]:
        return {"model_path": "/nowhere", "weight_version": state["weight_version"], "is_generation": True}

    @app.get("/seen")
    async def seen() -> list[Any]:
        return state["seen"]

    @app.post("/fake")
    async def fake(request: Request) -> None:
        state.update(await request.json())

    @app.get("/v1/loads")
    async def loads() -> dict[str, Any]:
        return {"loads": [{"dp_rank": 0, "num_running_reqs": state["running"], "num_waiting_reqs": 0}]}

    @app.post("/abort_request")
    async def abort(request: Request) -> Response:
        state["seen"].append(["abort_request", await request.json()])
        state["running"] = max(0, state["running"] - 1)
        return Response()

    @app.get("/flush_cache")
    async def flush() -> Response:
        if state["flush_refusals"] > 0:
            state["flush_refusals"] -= 1
            return Response("Flush cache failed.", status_code=400)
        return Response("Cache flushed.")

    @app.post("/generate")
    async def generate(request: Request) -> dict[str, Any]:
        body = await request.json()
        state["seen"].append(["generate", body])
        return {"output_ids": body["input_ids"][::-1], "meta_info": {"weight_version": "7", "extra": 1}}

    @app.post("/update_weights_from_disk")
    @app.post("/update_weights_from_tensor")
    @app.post("/update_weights_from_distributed")
    async def update(request: Request) -> dict[str, Any]:
        body = await request.json()
        state["seen"].append([request.url.path.strip("/"), body])
        state["weight_version"] = body["weight_version"]
        return {"success": True, "message": "ok"}

    @app.post("/weights_checker")
    async def weights_checker() -> dict[str, Any]:
        return {"success": False, "message": "weights differ"}

    return app


if __name__ == "__main__":
    key = sys.argv[2] if len(sys.argv) > 2 else None
    uvicorn.run(make_app(key), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
