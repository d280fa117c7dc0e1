"""What every server of ours knows of a request from its head: whose page asks, who, and how much comes."""

import asyncio
import http.client
import socket
import threading
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest

from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter, refusals
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.backends.embedded_engine.http import bodies
from slime.backends.embedded_engine.http.app import create_app as engine_app
from slime.backends.embedded_engine.weights_fence import WeightsFence
from slime.router import asgi, http_server
from slime.router.router import SlimeRouter
from slime.router.serving import listening
from slime_plugins.rollout_buffer import buffer
from tests.engines import free_port
from tests.router.conftest import router_args
from tests.serving import served

pytestmark = pytest.mark.slow

MOST = 1000
KEY = "k"
TIMEOUT_S = 120
TOKENIZER = SimpleNamespace(chat_template=None, added_tokens_decoder={}, decode=str)
"""Nothing is rendered here."""


class Nothing:
    """Middleware of a SlimeRouter that does nothing."""

    def __init__(self, app, *, router) -> None:
        self._app = app

    async def __call__(self, scope, receive, send) -> None:
        await self._app(scope, receive, send)


@contextmanager
def engine(host):
    args = SimpleNamespace(host=host, api_key=KEY, admin_api_key=None)
    state = SimpleNamespace(args=args, engine=SimpleNamespace(fence=WeightsFence()))
    with served(engine_app(state), host=host) as port:
        yield port


@contextmanager
def router_behind_middleware(host):
    args = router_args(
        sglang_router_ip=host, sglang_api_key=KEY, slime_router_middleware_paths=[f"{__name__}.Nothing"]
    )
    with served(SlimeRouter(args).app, host=host) as port:
        yield port


@contextmanager
def router(host):
    args = router_args(sglang_router_ip=host, sglang_api_key=KEY)
    loop, stop, started = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
    own, port = SlimeRouter(args), free_port()

    async def serve():
        async with own.running(), listening(own.front, host, port):
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(TIMEOUT_S)
    try:
        yield port
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def adapter(kind):
    @contextmanager
    def serve(host):
        api = kind(tokenizer=TOKENIZER, sglang_url="http://127.0.0.1:1/generate")
        api.open_session(KEY)
        handle = run_app_in_thread(api.app, host=host)
        try:
            yield handle.port
        finally:
            handle.stop()

    return serve


@contextmanager
def rollout_buffer(host):
    with served(buffer.create_app(buffer.RolloutBuffer(), host, KEY), host=host) as port:
        yield port


SERVERS = {
    "engine": (engine, "/generate", True),
    "router": (router, "/generate", True),
    "router behind middleware": (router_behind_middleware, "/generate", True),
    "OpenAI's API": (adapter(OpenAIAdapter), "/v1/chat/completions", True),
    "Anthropic's API": (adapter(AnthropicAdapter), "/v1/messages", True),
    "buffer": (rollout_buffer, "/buffer/write", True),
}
every_server = pytest.mark.parametrize("name", SERVERS)


@pytest.fixture(autouse=True)
def short_bodies(monkeypatch):
    for module, limit in (
        (bodies, "MAX_BODY_BYTES"),
        (http_server, "BODY_BYTES"),
        (asgi, "BODY_BYTES"),
        (refusals, "BODY_LIMIT"),
        (buffer, "BODY_BYTES"),
    ):
        monkeypatch.setattr(module, limit, MOST)
    monkeypatch.setattr(bodies.read_json, "__defaults__", (MOST,))
    monkeypatch.setattr(bodies.read_body, "__defaults__", (MOST,))


def status(port, path, headers, body=b"{}", host=None):
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)) as client:
        client.putrequest("POST", path, skip_host=True)
        for pair in {
            "Host": host or f"127.0.0.1:{port}",
            "Content-Length": str(len(body)),
            **headers,
        }.items():
            client.putheader(*pair)
        client.endheaders(body)
        return client.getresponse().status


OWNER = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}


@every_server
def test_pages_of_other_sites_are_refused(name):
    serve, path, _ = SERVERS[name]
    with serve("127.0.0.1") as port:
        foreign = [
            ("evil.example", {}),
            (f"127.0.0.1.evil.example:{port}", {}),
            ("[::1", {}),
            (f"127.0.0.1:{port}", {"Origin": "http://evil.example"}),
            (f"127.0.0.1:{port}", {"Origin": "null"}),
            (f"127.0.0.1:{port}", {"Origin": "http://[::1"}),
            (f"127.0.0.1:{port}", {"Origin": "http://127.0.0.1:2"}),
        ]
        for host, headers in foreign:
            assert status(port, path, OWNER | headers, host=host) == 403, (host, headers)
        own = [
            (f"127.0.0.1:{port}", {}),
            (f"LOCALHOST:{port}", {}),
            (f"[::1]:{port}", {"Origin": f"http://[::1]:{port}"}),
        ]
        for host, headers in own:
            assert status(port, path, OWNER | headers, host=host) not in (401, 403, 413), (host, headers)


@every_server
def test_a_server_for_other_machines_is_asked_under_any_name(name):
    serve, path, _ = SERVERS[name]
    with serve("0.0.0.0") as port:
        assert status(port, path, OWNER, host=f"node-7.cluster:{port}") not in (401, 403, 413)
        evil = OWNER | {"Origin": "http://evil.example"}
        assert status(port, path, evil, host=f"node-7.cluster:{port}") == 403


def first_bytes(port, head):
    """Returns the first bytes of the answer to a head whose body never comes."""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as client:
        client.sendall(head)
        return client.recv(100)


@every_server
def test_key_and_size_are_known_before_the_body_comes(name):
    serve, path, keyed = SERVERS[name]
    with serve("127.0.0.1") as port:
        line = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        owner = f"Authorization: Bearer {KEY}\r\n"
        answer = first_bytes(port, f"{line}{owner}Content-Length: {MOST + 1}\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 413")
        if keyed:
            other = "Authorization: Bearer other\r\n"
            # The router without middleware throws the body away as it comes, and then answers.
            sent = "{" * (MOST if name == "router" else 1)
            answer = first_bytes(port, f"{line}{other}Content-Length: {MOST}\r\n\r\n{sent}".encode())
            assert answer[9:12] == b"401", answer


@every_server
def test_chunks_have_a_bound_together(name):
    serve, path, _ = SERVERS[name]
    with serve("127.0.0.1") as port:
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {KEY}\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunk = b"190\r\n" + b"x" * 400 + b"\r\n"
        assert first_bytes(port, head.encode() + chunk * 3).startswith(b"HTTP/1.1 413")
