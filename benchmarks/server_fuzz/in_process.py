"""Servers that are ASGI applications, which are asked without a socket."""

import asyncio
import json
import re
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.server_fuzz.documents import Schema, among, document, endpoints_of, named, of_fastapi
from benchmarks.server_fuzz.engine_document import engine_document
from benchmarks.server_fuzz.messages import Answer, Sent, asgi
from benchmarks.server_fuzz.target import KEY, Target
from slime.arguments.groups.embedded_engine import EmbeddedServerArgs
from slime.backends.embedded_engine.build import build_server
from slime.backends.embedded_engine.http.app import create_app as engine_app
from slime.cli.dashboard import runs_of
from slime.dashboard.server import dashboard as dashboard_app
from slime_plugins.rollout_buffer.buffer import RolloutBuffer
from slime_plugins.rollout_buffer.buffer import create_app as buffer_app
from slime_plugins.training_service.app import create_app as service_app
from slime_plugins.training_service.tenants import Tenants
from tests.dashboard.planted import RECORDED, ROLLOUTS, plant
from tests.engines.embedded import make_checkpoint
from tests.run_args import config_with
from tests.slime_plugins.test_training_service import PASS, Trainer, sampled

_JSON = ((b"content-type", b"application/json"),)
_SWITCH_SECONDS = 0.0005
"""The engine's own process has it so."""


def post(target: str, **body: object) -> Sent:
    return Sent("POST", target, _JSON, json.dumps(body).encode())


@asynccontextmanager
async def engine(folder: Path, key: str | None) -> AsyncIterator[Target]:
    """The embedded engine with a model of one layer."""
    make_checkpoint(folder / "model", num_hidden_layers=1)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    sys.setswitchinterval(_SWITCH_SECONDS)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    args = EmbeddedServerArgs(
        model_path=str(folder / "model"),
        context_length=64,
        max_running_requests=8,
        enable_memory_saver=True,
        enable_metrics=True,
        enable_lora=True,
        max_lora_rank=8,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        api_key=key,
    )
    state = build_server(args)
    state.engine.start(asyncio.get_running_loop())
    app = engine_app(state)
    ask = asgi(app)

    async def restore() -> None:
        # Of an update that /take_weights has cut off nothing is left to end: another one has to.
        updates = ("begin_weight_update", "end_weight_update")
        for path in ("resume_memory_occupation", *updates, "continue_generation"):
            await ask(target.keyed(Sent("POST", f"/{path}")))

    def would_wait(sent: Sent) -> bool:
        """For other ranks of a process group, as it should."""
        found = re.findall(rb'"world_size": *([0-9]+)', sent.body)
        return sent.path == "/init_weights_update_group" and any(int(size) > 1 for size in found)

    async def prepare(sent: Sent) -> None:
        """Begins an update, without which all that updates weights is refused."""
        if sent.path.startswith("/update_weights_from"):
            await ask(target.keyed(Sent("POST", "/begin_weight_update")))

    right = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
    target = Target(
        engine_document(app, args.model_path),
        ask,
        post("/generate", **right),
        lambda answer: len(json.loads(answer.body)["output_ids"]) == 5,
        key,
        opened=lambda sent: (
            sent.path.startswith(("/health", "/ready", "/metrics")) or sent.method == "OPTIONS"
        ),
        told=lambda sent, status: status == 503 and sent.path in ("/ready", "/health", "/health_generate"),
        restore=restore,
        rests=lambda: bool(state.engine.paused or state.engine.updating or state.engine.released),
        skips=would_wait,
        prepare=prepare,
    )
    try:
        yield target
    finally:
        state.engine.stop()
        if state.grammars is not None:
            state.grammars.close()
        dist.destroy_process_group()


@asynccontextmanager
async def rollout_buffer(folder: Path, key: str | None) -> AsyncIterator[Target]:
    """The rollout buffer with a file of its own."""
    buffer = RolloutBuffer(1, file=folder / "buffer.sqlite", max_waiting=500, keep=50, api_key=key)
    app = buffer_app(buffer, "127.0.0.1", key)
    made = of_fastapi(app, endpoints_of(app.routes))
    start = made["components"]["schemas"]["Start"]["properties"]
    start["task_type"] = among("outside")
    start["num_repeat_per_sample"] = among(1, 2)
    ask = asgi(app)

    async def restore() -> None:
        """Another start, on an empty queue."""
        await ask(target.keyed(post("/start_rollout", task_type="outside", num_repeat_per_sample=1)))

    target = Target(
        made,
        ask,
        Sent("GET", "/buffer/status"),
        lambda answer: json.loads(answer.body)["success"] is True,
        key,
        restore=restore,
    )
    try:
        yield target
    finally:
        buffer.close()


@asynccontextmanager
async def training_service(folder: Path, key: str | None) -> AsyncIterator[Target]:
    """The training service for two tenants, over a trainer and an engine that compute nothing."""
    trainer = Trainer()
    flags = {"lora_rank": 8, "lora_alpha": 16, "lora_merge": False, "lora_adapters": ["alice", "bob"]}
    tenants = Tenants(config_with(**flags, save=str(folder), max_tokens_per_gpu=64, vocab_size=50), trainer)
    tenants.begin()
    app = service_app(tenants, sampled, "127.0.0.1", key)
    made = of_fastapi(app, endpoints_of(app.routes), parameters=_of_tenants(app.openapi()["paths"]))
    schemas, token = made["components"]["schemas"], {"type": "integer", "minimum": 0, "maximum": 60}
    schemas["ForwardBackward"] = {"anyOf": [among(PASS), schemas["ForwardBackward"]]}
    schemas["Sample"]["properties"]["prompt"] = {
        "type": "array",
        "items": token,
        "minItems": 1,
        "maxItems": 9,
    }
    for name in ("name", "of"):
        schemas["State"]["properties"][name] = among("alice", "first", "A.b-c_1")

    async def restore() -> None:
        trainer.calls.clear()
        trainer.updates.clear()
        shutil.rmtree(folder / "tenants", ignore_errors=True)

    yield Target(
        made,
        asgi(app),
        post("/tenants/alice/forward_backward", **PASS),
        lambda answer: len(json.loads(answer.body)["loss_fn_outputs"]) == 1,
        key,
        restore=restore,
    )


def _of_tenants(paths: dict[str, object]) -> dict[str, list[Schema]]:
    tenant = named("name", among("alice", "bob"), "path")
    return {path: [tenant] for path in paths if "{name}" in path}


@asynccontextmanager
async def dashboard(folder: Path, key: str | None) -> AsyncIterator[Target]:
    """The dashboard of a run with four faults in it; there is none without a key."""
    app = dashboard_app(runs_of([str(plant(folder))]), KEY, "127.0.0.1")
    step = named("step", among(*RECORDED, 0, ROLLOUTS))
    number = {"type": "integer", "minimum": 0, "maximum": 20}
    wanted = [
        *(named("metric", among("rollout/raw_reward", "none")), named("run", among(folder.name))),
        *(step, named("start", number), named("number", number)),
    ]
    paths = [route.path.replace("{key}", KEY) for route in app.routes]

    def showing(sent: Sent, given: bytes) -> Sent:
        return (
            sent if given == KEY.encode() else replace(sent, target=sent.target.replace(KEY, given.hex(), 1))
        )

    yield Target(
        document([("get", path) for path in paths], {}, {path: wanted for path in paths if "/api/" in path}),
        asgi(app),
        Sent("GET", f"/{KEY}/api/runs"),
        lambda answer: json.loads(answer.body)[0]["problem"] is None,
        KEY,
        showing=showing,
        hiding=lambda sent: showing(sent, b""),
        refusals=frozenset({404}),
    )


def is_ok(answer: Answer) -> bool:
    return answer.status == 200
