"""Whoever reaches the router's port without its key, or by way of somebody's browser."""

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from fastapi.responses import RedirectResponse, Response, StreamingResponse

from slime.router import asgi, http_server, serving
from slime.utils.worker_url import spelling, worker_url
from tests.router.conftest import exchanged, served

ROOT = Path(__file__).parents[2]
NO_WORKERS = [
    *(
        "http://a..b:80",
        "http://h:99999",
        "http://h:0",
        "http://u:p@h:1",
        "http://h:1#",
        "http://h:1?",
        "http://",
    ),
    *(
        "http://h:1/x",
        "http://-h:1",
        "http://[::1:1",
        "ftp://h:1",
        "h:1",
        "http://h\n:1",
        "http://ⅽ:1",
        5,
        None,
    ),
    *(f"http://{'a' * 64}:1", f"http://{'.'.join('a' * 150)}:1"),
]


@pytest.mark.parametrize("url", NO_WORKERS)
def test_what_is_no_address_of_a_worker_is_none(url) -> None:
    assert worker_url(url) is None


@pytest.mark.parametrize(
    ("url", "known"),
    [
        ("http://h:80", "http://h"),
        ("HTTP://Node-1:3000/", "http://node-1:3000"),
        ("http://[::1]:1", "http://[::1]:1"),
        ("https://a_b.c:1", "https://a_b.c:1"),
        ("http://10.0.0.1:1", "http://10.0.0.1:1"),
    ],
)
def test_an_address_has_one_spelling(url, known) -> None:
    assert worker_url(url) == url.rstrip("/")
    assert spelling(url) == spelling(known) == known


async def test_a_bad_address_of_a_worker_is_refused_and_ends_nothing(start_engine) -> None:
    engine = start_engine()
    async with served() as router:
        for url in ("http://a..b:80", "http://h:99999", "http://u:p@h:1"):
            async with router.client.post("/add_worker", params={"url": url}) as answer:
                assert answer.status == 400
            assert (await router.post("/workers", url=url))[0] == 400
        await router.add(engine)
        status, answer = await router.post("/workers", url=engine.url.replace("http", "HTTP"))
        assert status == 400 and engine.url in answer["error"]["message"]
        assert (await router.get("/list_workers"))[1] == {"urls": [engine.url]}


async def test_an_address_that_no_resolver_takes_is_a_sick_worker() -> None:
    async with served() as router, router.router.running() as health:
        worker = router.router.pool.add("http://a..b:80")
        await health.check(worker)
        assert worker.failures >= 1 and "label" in worker.reason


def in_two_parts(headers: dict[str, str]) -> Callable[[Any], Response]:
    """Answers with a body that comes some time after its head."""

    async def later() -> AsyncIterator[bytes]:
        await asyncio.sleep(0.05)
        yield b"x"

    return lambda body: StreamingResponse(later(), headers={**headers, "content-length": "1"})


JUNK = [
    *({"weight_version": version} for version in ("9" * 5000, [1], {"a": 1}, None, -1, 1.5, "٣" * 5000)),
    *(7, [], Response("[" * 100_000), Response(b"\xff"), Response("9" * 5000), Response("x" * 2**22)),
    *(RedirectResponse(where) for where in ("http://a..b:80", "/model_info", "http://[::1", "ftp://h")),
    *(in_two_parts({"content-encoding": encoding}) for encoding in ("gzip", "deflate", "br", "?")),
    Response("", 500),
]


async def test_no_answer_of_a_worker_ends_the_health_checks(start_engine) -> None:
    engine = start_engine()
    async with served() as router, router.router.running() as health:
        worker = router.router.pool.add(engine.url)
        for junk in JUNK:
            engine.answers["model_info"] = junk
            await health.check(worker)
            assert worker.version is None and "Timeout" not in str(worker.reason), junk
        engine.answers["model_info"] = {"weight_version": "12"}
        await health.check(worker)
        assert worker.version == 12 and not health.task.done()


async def test_of_a_body_without_the_key_nothing_is_kept() -> None:
    size, part = 2**26, bytes(2**16)
    head = b"POST /generate HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % size
    async with served(sglang_api_key="k") as router:
        tracemalloc.start()
        try:
            answer = await exchanged(router, head, *([part] * (size // len(part))))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert answer.startswith(b"HTTP/1.1 401") and peak < size / 8


@pytest.fixture
def short_bodies(monkeypatch) -> None:
    monkeypatch.setattr(http_server, "BODY_BYTES", 1000)
    monkeypatch.setattr(asgi, "BODY_BYTES", 1000)


CHUNK = b"190\r\n" + b"x" * 400 + b"\r\n"
TOO_LONG = [
    (b"Content-Length: 1001\r\n\r\n",),
    (b"Transfer-Encoding: chunked\r\n\r\n", CHUNK, CHUNK, CHUNK),
    (b"Transfer-Encoding: chunked\r\n\r\n" + CHUNK * 3 + b"0\r\n\r\n",),
]


@pytest.mark.parametrize("rest", TOO_LONG)
async def test_a_body_that_is_too_long_is_refused(rest, short_bodies) -> None:
    async with served() as router:
        answer = await exchanged(router, b"POST /generate HTTP/1.1\r\n" + rest[0], *rest[1:])
    assert answer.startswith(b"HTTP/1.1 413") and answer.count(b"HTTP/1.1") == 1


async def test_a_wish_for_another_protocol_behind_a_fault_is_not_looked_at(short_bodies) -> None:
    wish = b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n"
    async with served() as router:
        answer = await exchanged(router, b"POST /generate HTTP/1.1\r\n" + TOO_LONG[2][0] + wish)
    assert answer.startswith(b"HTTP/1.1 413") and answer.count(b"HTTP/1.1") == 1


async def test_a_trailer_has_an_end() -> None:
    head = b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX-Long: "
    async with served() as router:
        answer = await exchanged(router, head, *([b"a" * 2**16] * 8))
    assert answer.startswith(b"HTTP/1.1 400") and b"not its body" in answer


async def test_many_chunks_are_no_trailer(start_engine) -> None:
    engine = start_engine()
    engine.answers["generate"] = lambda body: {"length": len(body["text"])}
    text = b'{"text":"' + b"x" * 200_000 + b'"}'
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in text)
    head = b"POST /generate HTTP/1.1\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with served() as router:
        await router.add(engine)
        answer = await exchanged(router, head, chunks, b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200") and b"200000" in answer


async def test_silent_clients_keep_nobody_out(monkeypatch) -> None:
    monkeypatch.setattr(serving, "max_clients", lambda: 10)
    async with served() as router:
        port = int(router.url.rpartition(":")[2])
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
        for _ in range(5):
            answer = await exchanged(router, b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200")
        for _, writer in silent:
            writer.close()


@pytest.mark.parametrize(("now", "most", "clients"), [(256, 256, 64), (1024, -1, 448), (64, 64, 1)])
def test_clients_leave_descriptors_for_engines(monkeypatch, now, most, clients) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (now, most))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: None)
    assert serving.max_clients() == clients


FEW = """
import asyncio, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from slime.router.router import SlimeRouter
from slime.router.serving import listening
from tests.router.conftest import router_args

async def main():
    args = router_args()
    router = SlimeRouter(args)
    async with router.running(), listening(router.front, "127.0.0.1", args.sglang_router_port):
        print(args.sglang_router_port, flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


@pytest.mark.slow
def test_more_clients_than_descriptors_stop_nothing_and_fill_no_log(tmp_path: Path) -> None:
    with ExitStack() as stack:
        log = stack.enter_context((tmp_path / "log").open("w+"))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        router = stack.enter_context(subprocess.Popen([sys.executable, "-c", FEW], cwd=ROOT, **pipes))
        stack.callback(router.kill)
        port = int(router.stdout.readline())
        router.send_signal(signal.SIGSTOP)  # so that it finds them all at once
        for _ in range(400):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(b"GET /health HT")
        router.send_signal(signal.SIGCONT)
        for _ in range(5):
            with urlopen(f"http://127.0.0.1:{port}/health", timeout=30) as answer:
                assert answer.status == 200
        router.communicate()
        assert router.returncode == 0 and log.seek(0, os.SEEK_END) < 10_000


class Nothing:
    """Middleware that does nothing."""

    def __init__(self, app, *, router) -> None:
        self._app = app

    async def __call__(self, scope, receive, send) -> None:
        await self._app(scope, receive, send)


behind_middleware = partial(served, slime_router_middleware_paths=[f"{__name__}.Nothing"])

LOOSE = [
    b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET /health HTTP/1.1\nHost: 127.0.0.1\n\n",
    b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\nX: 1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: 1\r\n 2\r\n\r\n",
]


@pytest.mark.parametrize("request_bytes", LOOSE)
@pytest.mark.parametrize("serve", [served, behind_middleware])
async def test_what_another_server_might_read_in_another_way_is_refused(serve, request_bytes) -> None:
    async with serve() as router:
        answer = await exchanged(router, request_bytes)
    assert answer.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("rest", TOO_LONG)
async def test_behind_middleware_bodies_have_the_same_end(rest, short_bodies) -> None:
    async with behind_middleware() as router:
        head = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        assert (await exchanged(router, head + rest[0], *rest[1:])).startswith(b"HTTP/1.1 413")


FOREIGN = [
    b"Host: evil.example\r\n",
    b"Host: 127.0.0.1.evil.example:80\r\n",
    b"Host: 127.0.0.1\r\nOrigin: http://evil.example\r\n",
    b"Host: localhost:80\r\nOrigin: null\r\n",
    b"Host: 127.0.0.1:1\r\nOrigin: http://127.0.0.1:2\r\n",
    b"Host: 127.0.0.1\r\nOrigin: http://[::1\r\n",
]
OWN = [b"Host: 127.0.0.1:5\r\n", b"Host: LOCALHOST\r\n", b"Host: [::1]:5\r\nOrigin: http://[::1]:5\r\n"]


@pytest.mark.parametrize("serve", [served, behind_middleware])
async def test_pages_of_other_sites_are_refused_on_loopback(serve) -> None:
    async with serve() as router:
        for headers, status in [*((one, 403) for one in FOREIGN), *((one, 200) for one in OWN)]:
            request = b"GET /health HTTP/1.1\r\n" + headers + b"Connection: close\r\n\r\n"
            assert (await exchanged(router, request)).startswith(b"HTTP/1.1 %d" % status), headers
