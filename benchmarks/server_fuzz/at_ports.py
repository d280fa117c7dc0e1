"""Servers that are asked at a port of this machine: their own HTTP is a part of them."""

import json
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from aiohttp import web

from benchmarks.server_fuzz.documents import TEXT, Document, among, document, named
from benchmarks.server_fuzz.engine_document import VOCABULARY, engine_document
from benchmarks.server_fuzz.in_process import is_ok, post
from benchmarks.server_fuzz.messages import Loopback, Sent
from benchmarks.server_fuzz.target import Target
from slime.agent.aiohttp_threaded import LISTENS_ON
from slime.backends.embedded_engine.http.app import create_app as engine_app
from slime.backends.embedded_engine.http.bodies import PullWeightsBody
from slime.backends.embedded_engine.weights_fence import WeightsFence
from slime.backends.megatron_utils.server.app import LogProbApp
from slime.backends.megatron_utils.server.arguments import MegatronServerConfig
from slime.config.engines import CONTROL_FILE
from slime.config.run import run_config
from slime.observability.prometheus import PrometheusSink
from slime.ray.engine_control import engine_control as serve_control
from slime.router.router import SlimeRouter
from slime.router.serving import listening
from slime.weight_sync.versions.puller import PullServer
from tests.engines import free_port
from tests.ray.test_engine_control import Rollout
from tests.run_args import run_args, with_groups

_HOST = "127.0.0.1"
_CLOSED = [f"http://{_HOST}:{port}" for port in range(1, 10)]
"""Where nobody listens. Addresses of elsewhere are asked as they are given, so none are."""


@asynccontextmanager
async def served_at_port(app: web.Application) -> AsyncIterator[int]:
    """An application of aiohttp at a port, as `slime.agent.aiohttp_threaded` has it."""
    app[LISTENS_ON] = _HOST
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, _HOST, 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@asynccontextmanager
async def router(folder: Path, key: str | None) -> AsyncIterator[Target]:
    """SlimeRouter before two workers that tell how long a body was."""
    flags = {
        **{"sglang_router_ip": _HOST, "sglang_server_concurrency": 64, "rollout_num_engines": 2},
        **{"rollout_health_check_interval": 1.0, "rollout_health_check_timeout": 300.0},
        **{"use_slime_router": True, "slime_router_radix_tree_tokens": 1000, "sglang_api_key": key},
    }
    served = SlimeRouter(with_groups({**flags, "sglang_router_port": free_port()}))
    port = served.settings.port
    async with AsyncExitStack() as stack:
        workers = [
            f"http://{_HOST}:{await stack.enter_async_context(served_at_port(_worker()))}" for _ in range(2)
        ]
        await stack.enter_async_context(served.running())
        await stack.enter_async_context(listening(served.front, _HOST, port))
        client = Loopback(port)

        async def restore() -> None:
            for worker in list(served.pool):
                if worker.url not in workers:
                    served.pool.remove(worker.url)
            for url in workers:
                await client.ask(target.keyed(post("/workers", url=url)))

        target = Target(
            _router_document(workers, str(folder)),
            client.ask,
            post("/generate", input_ids=[1]),
            lambda answer: answer.status == 200 and json.loads(answer.body)["bytes"] > 0,
            key,
            opened=lambda sent: sent.path in ("/health", "/liveness", "/readiness", "/metrics"),
            holds=False,
            told=lambda sent, status: status == 503 and not any(w.state == "serving" for w in served.pool),
            restore=restore,
            loopback=client,
        )
        await restore()
        yield target
        client.close()


def _worker() -> web.Application:
    async def answer(request: web.Request) -> web.StreamResponse:
        read = await request.read()
        told = web.json_response({"bytes": len(read), "weight_version": "1"})
        if len(read) % 5 == 0 and request.method != "HEAD":
            told.enable_chunked_encoding()
        return told

    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", answer)
    return app


def _router_document(workers: list[str], folder: str) -> Document:
    """What it answers itself, and what an engine does, to which it passes everything else on."""
    args = SimpleNamespace(host=_HOST, api_key=None, admin_api_key=None)
    state = SimpleNamespace(args=args, engine=SimpleNamespace(fence=WeightsFence()))
    made = engine_document(engine_app(state), folder)  # type: ignore[arg-type]
    url = {
        "type": "string",
        "enum": [*_CLOSED, *workers, "http://", "ftp://x", "localhost", "", "http://a b"],
    }
    worker = {
        "type": "object",
        "properties": {"url": url, "api_key": TEXT, "worker_type": among("regular", "prefill", None)},
        "required": ["url"],
    }
    old = {"type": "object", "properties": {"url": url, "worker_url": url}}
    own = document(
        [
            *(("get", path) for path in ("/health", "/liveness", "/readiness", "/metrics", "/workers")),
            *(
                ("post", path)
                for path in ("/workers", "/add_worker", "/remove_worker", "/retrieve_from_text")
            ),
            *(("get", "/list_workers"), ("get", "/workers/{id}"), ("delete", "/workers/{id}")),
        ],
        {
            **{"/workers": worker, "/add_worker": old, "/remove_worker": old},
            "/retrieve_from_text": {"type": "object", "properties": {"text": TEXT, "prompt_characters": {}}},
        },
        {
            "/workers/{id}": [named("id", among(*_CLOSED[:2], *workers[:1]), "path")],
            **{path: [named("url", url)] for path in ("/add_worker", "/remove_worker")},
        },
    )
    return made | {"paths": made["paths"] | own["paths"]}


@asynccontextmanager
async def log_probs(folder: Path, key: str | None) -> AsyncIterator[Target]:
    """The log-prob server before a model that finds everything certain."""
    config = MegatronServerConfig(
        **{
            "load": None,
            "hf_checkpoint": str(folder),
            "vocab_size": VOCABULARY,
            "params_dtype": torch.float32,
        },
        **{"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "teacher_host": _HOST},
        **{"teacher_port": 1, "teacher_warmup_port": 1, "teacher_warmup_timeout_s": 1.0},
        **{"teacher_sample_reduction_chunk_size": 1, "teacher_label_reduction_chunk_size": 1},
        **{"megatron_server_max_length": 100, "megatron_server_update_timeout_s": 60.0},
        megatron_server_warmup=False,
    )
    served = LogProbApp(config, key)
    served.state = ""

    def work() -> None:
        while (asked := served.work.get()).what != "end":
            found = {"log_probs": [0.0] * (len(asked.about["ids"]) - 1)} if asked.what == "answer" else None
            asked.outcome.set_result(found)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    tokens = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": VOCABULARY - 1}}
    labels = {"anyOf": [tokens, {"type": "array", "items": tokens}]}
    question = {
        "type": "object",
        "properties": {
            "input_ids": tokens | {"minItems": 1},
            "sample_n": {"type": "integer", "minimum": 0, "maximum": 1024},
            "label_token_ids": labels,
            "sampling_params": {"type": "object", "properties": {"max_new_tokens": {"enum": [0]}}},
            "return_logprob": {"type": "boolean"},
        },
        "required": ["input_ids"],
    }
    weights = {name: among(str(folder)) for name in ("model_path", "path", "load")}
    update = {"type": "object", "properties": {**weights, "timeout_s": {"type": "number", "minimum": 1}}}
    async with served_at_port(served.app) as port:
        client = Loopback(port)
        yield Target(
            document(operations_of(served.app), {"/generate": question, "/update_weights_from_disk": update}),
            client.ask,
            post("/generate", input_ids=[1, 2]),
            lambda answer: json.loads(answer.body)["log_probs"] == [0.0],
            key,
            opened=lambda sent: sent.path == "/healthz",
            told=lambda sent, status: status == 504 and sent.path == "/update_weights_from_disk",
            loopback=client,
        )
        client.close()
    served.work.put(SimpleNamespace(what="end"))  # type: ignore[arg-type]
    worker.join()


def operations_of(app: web.Application) -> list[tuple[str, str]]:
    routes = [(route.method, route.resource) for route in app.router.routes()]
    return [(method, place.canonical) for method, place in routes if place is not None and method != "HEAD"]


def _of_http_server(sent: Sent, status: int) -> bool:
    """http.server's answer to a method that it does not know."""
    return status == 501 and sent.method not in ("GET", "POST")


@asynccontextmanager
async def engine_control(folder: Path, key: str | None) -> AsyncIterator[Target]:
    """The server of `slime engines`, before a fleet of two; there is none without a key."""
    fleet = Rollout()
    first = [replace(row, url="http://127.0.0.1:9") for row in fleet.rows]  # none answers there
    fleet.rows[:] = first
    with serve_control(run_config(run_args(save=str(folder))), fleet):  # type: ignore[arg-type]
        told = json.loads((folder / CONTROL_FILE).read_text())
        client = Loopback(int(told["url"].rpartition(":")[2]))

        async def restore() -> None:
            fleet.rows[:], fleet.asked[:] = first, []

        seconds = {"type": "number", "minimum": 0, "maximum": 100}
        numbers = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 3}}
        drain = {"engines": numbers, "seconds": seconds, "notice": seconds}
        add = {
            "count": {"type": "integer", "minimum": 1, "maximum": 4},
            "model": among("", "default"),
        }
        bodies = {
            "/engines/drain": {"type": "object", "properties": drain, "required": ["engines", "seconds"]},
            "/engines/add": {"type": "object", "properties": add, "required": ["count"]},
        }
        yield Target(
            document([("get", "/engines"), ("post", "/engines/drain"), ("post", "/engines/add")], bodies),
            client.ask,
            Sent("GET", "/engines"),
            lambda answer: len(json.loads(answer.body)["engines"]) == 2,
            told["key"],
            opened=lambda sent: sent.method not in ("GET", "POST"),
            told=_of_http_server,
            restore=restore,
            loopback=client,
        )
        client.close()


@asynccontextmanager
async def prometheus(folder: Path, key: str | None) -> AsyncIterator[Target]:
    """What Prometheus asks a run; it has no key."""
    sink = PrometheusSink(0)
    sink.write("rollout", 1, {"rollout/raw_reward": 0.5, "odd name\n": float("nan")})
    client = Loopback(sink.port)
    parameters = {"/metrics": [named("x", TEXT)], "/{path}": [named("path", TEXT, "path")]}
    yield Target(
        document([("get", "/metrics"), ("get", "/{path}")], {}, parameters),
        client.ask,
        Sent("GET", "/metrics"),
        lambda answer: b"slime_rollout_raw_reward" in answer.body,
        told=lambda sent, status: status == 501 and sent.method != "GET",
        foreign=frozenset({403, 501}),
        loopback=client,
    )
    client.close()
    sink.close()


@contextmanager
def _pulling(folder: Path, key: str | None) -> Any:
    server = PullServer(_HOST, 0, folder / "local", key)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@asynccontextmanager
async def puller(folder: Path, key: str | None) -> AsyncIterator[Target]:
    """The helper that fetches weights; the engine that can do so itself reads the same body."""
    with _pulling(folder, key) as server:
        client = Loopback(server.server_address[1])
        made = document([("get", "/health"), ("post", "/pull_weights")], {"/pull_weights": PullWeightsBody})
        asked = made["components"]["schemas"]["PullWeightsBody"]["properties"]
        asked["local_checkpoint_dir"] = among(str(folder / "local"))
        asked["source_dir"] = among(str(folder), "/proc", "/")
        yield Target(
            made,
            client.ask,
            Sent("GET", "/health"),
            is_ok,
            key,
            opened=lambda sent: sent.method != "POST",
            refusals=frozenset({401, 403, 404}),
            told=_of_http_server,
            foreign=frozenset({200, 403, 404, 501}),
            loopback=client,
        )
        client.close()
