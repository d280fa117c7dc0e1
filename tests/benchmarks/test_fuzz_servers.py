"""What fuzzing finds wrong with an answer, and what it adds up; schemathesis is not in this environment."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from benchmarks import fuzz_servers
from benchmarks.fuzz_servers import GOAL, SERVERS, Job, begun, jobs_of, note
from benchmarks.server_fuzz.documents import endpoints_of, of_fastapi
from benchmarks.server_fuzz.engine_document import engine_document
from benchmarks.server_fuzz.messages import DEADLINE_S, Answer, Loopback, Sent, asgi
from benchmarks.server_fuzz.target import (
    FOREIGN,
    KEY,
    SECRETS,
    Target,
    faults,
    faults_of_foreign,
    faults_without_key,
)
from slime.backends.embedded_engine.http.app import create_app as engine_app
from slime.backends.embedded_engine.weights_fence import WeightsFence
from slime_plugins.rollout_buffer.buffer import create_app as buffer_app

SHORT_S = 0.2
SENT = Sent("POST", "/a?b=1", (), b'{"c": 1}')
REFUSAL = JSONResponse({"error": "key"}, 401)


def target(answer: Callable[[Request], Any], deadline_s: float = DEADLINE_S, **more: Any) -> Target:
    """A server with a key that answers like this."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await (await answer(Request(scope, receive)))(scope, receive, send)

    return Target({}, asgi(app, deadline_s), SENT, lambda answer: answer.status == 200, KEY, **more)


async def shown(request: Request) -> Response:
    """Says what was asked, to who has the key."""
    if request.headers.get("authorization") != f"Bearer {KEY}":
        return REFUSAL
    body = await request.body()
    return JSONResponse({"path": request.url.path, "query": request.url.query, "bytes": len(body)})


async def test_a_server_that_does_everything_right_has_no_faults() -> None:
    server = target(shown)
    answer = await server.answer(server.keyed(SENT))
    assert faults(server, SENT, answer) == [] and answer.read
    assert json.loads(answer.body) == {"path": "/a", "query": "b=1", "bytes": 8}
    held = Sent(SENT.method, SENT.target, (), SENT.body, whole=False)
    for bare in (held, server.showing(held, b"wrong"), server.showing(held, b"\xff")):
        answer = await server.answer(bare)
        assert answer.status == 401 and faults_without_key(server, bare, answer) == []


async def _raises(request: Request) -> Response:
    raise ZeroDivisionError("planted")


async def _hangs(request: Request) -> Response:
    await asyncio.Event().wait()
    raise AssertionError


async def _answers(response: Response) -> Response:
    return response


ALWAYS: dict[str, tuple[Callable[[Request], Any], str]] = {
    "an error of its own": (_raises, "ZeroDivisionError: planted"),
    "no answer": (_hangs, "no answer within 0.2 s"),
    "500": (lambda request: _answers(Response(status_code=500)), "status 500"),
    "503 that nobody told of": (lambda request: _answers(Response(status_code=503)), "status 503"),
    "its key": (lambda request: _answers(PlainTextResponse(f"x{KEY}y")), f"tells a secret: {KEY}"),
    "a secret of the process": (
        lambda request: _answers(Response(headers={"x": next(iter(SECRETS.values()))})),
        "tells a secret: planted",
    ),
    "where it failed": (
        lambda request: _answers(PlainTextResponse("Traceback (most recent call last)", 400)),
        "tells a traceback",
    ),
    "no JSON": (
        lambda request: _answers(Response("{", 200, media_type="application/json")),
        "says it is JSON, and is none",
    ),
}


@pytest.mark.parametrize("name", ALWAYS)
async def test_what_is_wrong_with_an_answer_is_named(name: str) -> None:
    answers, told = ALWAYS[name]
    server = target(answers, SHORT_S if answers is _hangs else DEADLINE_S)
    found = faults(server, SENT, await server.answer(SENT))
    assert len(found) == 1 and found[0].startswith(told)


async def test_what_the_product_tells_of_is_no_fault() -> None:
    server = target(
        lambda request: _answers(Response(status_code=503)),
        told=lambda sent, status: status == 503 and sent.path == "/a",
    )
    assert faults(server, SENT, await server.answer(SENT)) == []
    assert faults(server, Sent("GET", "/b"), await server.answer(Sent("GET", "/b"))) == ["status 503"]


async def _reads_first(request: Request) -> Response:
    await request.body()
    return REFUSAL


async def test_nothing_but_a_refusal_will_do_without_the_key() -> None:
    open_to_all = target(lambda request: _answers(Response()))
    found = faults_without_key(open_to_all, SENT, await open_to_all.answer(SENT))
    assert found == ["status 200 without the key (wanted: [401, 403])"]
    reads = target(_reads_first)
    assert faults_without_key(reads, SENT, await reads.answer(SENT)) == ["the body was read without the key"]
    exempt = target(lambda request: _answers(Response()), opened=lambda sent: sent.path == "/a")
    assert faults_without_key(exempt, SENT, await exempt.answer(SENT)) == []
    foreign = Sent("GET", "/a", (FOREIGN,))
    found = faults_of_foreign(open_to_all, foreign, await open_to_all.answer(foreign))
    assert found == ["status 200 for another site (wanted: [403])"]


async def test_what_rests_is_answered_once_the_server_is_restored() -> None:
    resting = asyncio.Event()

    async def waits(request: Request) -> Response:
        await resting.wait()
        return Response()

    async def restore() -> None:
        resting.set()

    server = target(waits, restore=restore, rests=lambda: not resting.is_set())
    assert (await server.answer(SENT)).status == 200
    resting.clear()
    assert "no answer" in (await target(waits, SHORT_S, rests=lambda: True).answer(SENT)).failure


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", Answer(200, ((b"content-length", b"2"),), b"ok")),
        (b"HTTP/1.0 500 \r\n\r\nto the end", Answer(500, (), b"to the end")),
        (b"", "EOFError"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok", "RemoteProtocolError"),
        (None, "no answer within"),
    ],
    ids=["kept", "ended", "nothing", "cut", "silent"],
)
async def test_a_server_at_a_port_is_read_to_the_end_of_its_answer(raw: bytes | None, wanted: Any) -> None:
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        heard.append(await reader.readexactly(len(SENT.body)))
        if raw is None:
            await reader.read()
        else:
            writer.write(raw)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port, deadline_s = server.sockets[0].getsockname()[1], DEADLINE_S if raw is not None else SHORT_S
        client = Loopback(port, deadline_s)
        answer = await client.ask(SENT)
        client.close()
    assert heard[0].startswith(b"POST /a?b=1 HTTP/1.1\r\n") and heard[1] == SENT.body
    assert answer == wanted if isinstance(wanted, Answer) else wanted in answer.failure


@pytest.mark.filterwarnings("ignore:Duplicate Operation ID")
def test_documents_have_the_bodies_that_servers_read() -> None:
    args = SimpleNamespace(host="127.0.0.1", api_key=None, admin_api_key=None)
    state = SimpleNamespace(args=args, engine=SimpleNamespace(fence=WeightsFence()))
    engine = engine_document(engine_app(state), "model")  # type: ignore[arg-type]
    app = buffer_app(SimpleNamespace())  # type: ignore[arg-type]
    buffer = of_fastapi(app, endpoints_of(app.routes))

    def body(made: dict[str, Any], path: str) -> Any:
        operation = made["paths"][path]["post"]
        return operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]

    assert {path: body(engine, path) for path in ("/generate", "/v1/completions", "/pause_generation")} == {
        "/generate": "GenerateBody",
        "/v1/completions": "CompletionBody",
        "/pause_generation": "PauseBody",
    }
    sampling = engine["components"]["schemas"]["GenerateBody"]["properties"]["sampling_params"]
    assert sampling["properties"]["top_p"] == {"type": "number", "minimum": 0.0, "maximum": 1.0}
    assert body(buffer, "/buffer/write") == "Trajectory" and body(buffer, "/get_rollout_data") == "Fetch"
    assert "requestBody" not in buffer["paths"]["/buffer/status"]["get"]


def test_jobs_share_requests_by_server_with_and_without_a_key() -> None:
    jobs = jobs_of([*SERVERS], GOAL, first=7)
    counts = Counter[str]()
    for job in jobs:
        counts[job.server] += job.requests
    assert abs(sum(counts.values()) - GOAL) < len(SERVERS) and counts.keys() == SERVERS.keys()
    assert [job.number for job in jobs] == list(range(7, 7 + len(jobs)))
    keys = {name: {job.keyed for job in jobs if job.server == name} for name in SERVERS}
    assert keys == {name: {True, False} if SERVERS[name].without_key else {True} for name in SERVERS}


def test_runs_add_up_and_a_job_that_ended_is_a_fault(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(fuzz_servers, "commit", lambda: "c0ffee")
    output, found = tmp_path / "found.json", {"requests": 30, "cases": 10, "seconds": 2.0, "grown_mib": 1.5}
    for run, faults_of_job in enumerate(([], ["status 500: GET /"])):
        told, done = begun(output, "4"), Future[dict[str, Any]]()
        done.set_result(found | {"statuses": {"200": 29, "400": 1}, "faults": faults_of_job})
        note(told, Job("router", True, run, 30), done)
        output.write_text(json.dumps(told))
    lost = Future[dict[str, Any]]()
    lost.set_exception(RuntimeError("killed"))
    note(told, Job("engine", False, 2, 30), lost)
    assert (told["requests"], told["cases"], len(told["runs"])) == (60, 20, 2)
    assert told["servers"]["router"]["statuses"] == {"200": 58, "400": 2}
    assert told["runs"][0]["faults"] == [] and told["runs"][1]["faults"] == [
        "job 1, router: status 500: GET /",
        "job 2, engine without a key: the job ended: RuntimeError: killed",
    ]
    assert "router: 30 requests, 15 a second, 1 faults; 60 in all" in capsys.readouterr().out


def test_servers_are_where_they_are_said_to_be() -> None:
    for name, server in SERVERS.items():
        assert hasattr(import_module(f"benchmarks.server_fuzz.{server.module}"), name), name
