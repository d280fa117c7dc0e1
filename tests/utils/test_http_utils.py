import asyncio
import base64
import json
import pickle
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import httpx
import pytest

from slime.utils import http_utils
from slime.utils.http_utils import (
    HttpStatusError,
    UnnamedAdapter,
    asked_adapter,
    asking_adapter,
    get,
    init_http_client,
    post,
    share_key_with,
    stream,
)
from slime.utils.weight_clock import WeightClock
from tests.engines import free_port
from tests.run_args import plugin_args, run_args


class Handler(BaseHTTPRequestHandler):
    """Answers with the statuses in ``server.statuses``, then 200, and echoes what it got."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.requests += 1
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        echo = {"body": json.loads(body) if body else None, "key": self.headers.get("authorization")}
        self.reply(status, json.dumps(echo).encode(), "application/json")

    def do_GET(self):
        self.reply(200, b"plain", "text/plain")

    def reply(self, status, content, content_type):
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(content)))
        if self.server.content_encoding:
            self.send_header("content-encoding", self.server.content_encoding)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(http_utils, "RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr(http_utils, "_settings", http_utils._ClientSettings())
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.statuses, server.requests, server.content_encoding = [], 0, None
    server.url = f"http://127.0.0.1:{server.server_port}/x"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


async def test_post_returns_parsed_json(server):
    assert await post(server.url, {"a": [1, 2]}) == {"body": {"a": [1, 2]}, "key": None}


async def test_get_returns_text_where_the_answer_is_not_json(server):
    assert await get(server.url) == "plain"


async def test_server_errors_and_too_many_requests_are_retried(server):
    server.statuses = [503, 429, 500]
    assert (await post(server.url, {"a": 1}))["body"] == {"a": 1}
    assert server.requests == 4


async def test_a_bad_request_is_not_repeated_and_its_body_is_quoted(server):
    server.statuses = [400]
    with pytest.raises(HttpStatusError, match=r'POST .*/x: HTTP 400: \{"body": \{"a": 1\}') as caught:
        await post(server.url, {"a": 1})
    assert server.requests == 1
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301


async def test_retries_are_bounded(server):
    server.statuses = [500] * 10
    with pytest.raises(HttpStatusError, match="HTTP 500"):
        await post(server.url, {}, max_retries=2)
    assert server.requests == 3


async def test_an_unreachable_server_is_retried_then_named(server):
    # No port that the system gives to clients: one that connects to itself would be connected.
    url = f"http://127.0.0.1:{free_port()}/x"
    with pytest.raises(httpx.ConnectError, match=url):
        await post(url, {}, max_retries=2)


async def test_the_key_goes_to_own_servers_and_call_headers_win(server):
    router = dict(sglang_router_ip="127.0.0.1", sglang_router_port=1)
    args = run_args(sglang_server_concurrency=8, rollout_num_gpus=4, rollout_num_gpus_per_engine=2, **router)
    init_http_client(args, api_key="sekret")
    assert (await post(server.url, {}))["key"] is None  # a judge's, say
    share_key_with(server.url + "/generate")
    assert (await post(server.url, {}))["key"] == "Bearer sekret"
    args.sglang_router_port = urlsplit(server.url).port
    init_http_client(args, api_key="sekret")
    assert (await post(server.url, {}))["key"] == "Bearer sekret"
    assert (await post(server.url, {}, headers={"Authorization": "other"}))["key"] == "other"


async def test_requests_to_generate_name_the_adapter_that_is_trained_unless_they_say_otherwise(server):
    root = server.url.removesuffix("/x")
    where = {"sglang_router_ip": "127.0.0.1", "sglang_router_port": urlsplit(root).port}
    init_http_client(plugin_args(**where), adapters=["slime"])
    for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
        assert (await post(root + path, {"a": 1}))["body"] == {"lora_path": "slime", "a": 1}
    assert (await post(f"{root}/generate", {"lora_path": None}))["body"] == {"lora_path": None}
    assert (await post(f"{root}/abort_request", {"a": 1}))["body"] == {"a": 1}
    for body in ({"a": 1}, {"lora_path": "slime"}):
        with pytest.raises(UnnamedAdapter, match="/v1/responses: SGLang answers it with the base"):
            await post(f"{root}/v1/responses", body)
    assert (await post(f"{root}/v1/responses", {"lora_path": None}))["body"] == {"lora_path": None}
    init_http_client(plugin_args(sglang_router_ip="127.0.0.1", sglang_router_port=1), adapters=["slime"])
    assert (await post(f"{root}/generate", {"a": 1}))["body"] == {"a": 1}  # a judge's
    init_http_client(plugin_args(**where))
    assert (await post(f"{root}/generate", {"a": 1}))["body"] == {"a": 1}


async def test_requests_to_generate_start_from_no_prefix_of_older_weights(server, monkeypatch):
    """Whoever makes them; a key of their own goes on to count, and what is sent again has the later key."""
    root = server.url.removesuffix("/x")
    init_http_client(plugin_args(sglang_router_ip="127.0.0.1", sglang_router_port=urlsplit(root).port))
    assert (await post(f"{root}/generate", {"a": 1}))["body"] == {"a": 1}
    monkeypatch.setattr(http_utils, "clock", clock := WeightClock())
    clock.keeps_prefixes = True
    first = clock.cache_key()["extra_key"]
    theirs = "weights-0"  # which looks like one of these
    for own, wanted in (
        (None, first),
        ("k", f"{first} k"),
        (["k", ""], [f"{first} k", first]),
        (theirs, f"{first} {theirs}"),
    ):
        for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            asked = {"a": 1} if own is None else {"a": 1, "extra_key": own}
            assert (await post(root + path, asked))["body"] == {"a": 1, "extra_key": wanted}
    early = {"a": 1, **clock.cache_key()}
    monkeypatch.setattr(http_utils, "RETRY_PAUSE_S", 0.0)
    server.statuses.append(503)
    send = http_utils.send

    async def update(*words):
        answer = await send(*words)
        clock.begin_update()
        return answer

    monkeypatch.setattr(http_utils, "send", update)
    assert (await post(f"{root}/generate", early))["body"] == {"a": 1, **clock.cache_key()}
    assert (await post(f"{root}/abort_request", {"a": 1}))["body"] == {"a": 1}
    init_http_client(plugin_args(sglang_router_ip="127.0.0.1", sglang_router_port=1))
    assert (await post(f"{root}/generate", {"a": 1}))["body"] == {"a": 1}  # a judge's


def test_a_process_that_comes_after_another_one_takes_no_prefix_of_its_weights():
    one, other = WeightClock(), WeightClock()
    one.keeps_prefixes = other.keeps_prefixes = True
    assert one.updates == other.updates and one.cache_key() != other.cache_key()


async def test_of_several_adapters_that_of_the_task_is_asked_and_none_is_guessed(server):
    root = server.url.removesuffix("/x")
    where = {"sglang_router_ip": "127.0.0.1", "sglang_router_port": urlsplit(root).port}
    init_http_client(plugin_args(**where), adapters=["a", "b"])

    async def asked(name):
        with asking_adapter(name):
            found = await asyncio.create_task(post(f"{root}/generate", {}))
            return found["body"]["lora_path"], asked_adapter()

    assert await asyncio.gather(asked("a"), asked("b")) == [("a", "a"), ("b", "b")]
    with asking_adapter("a"):
        assert (await post(f"{root}/generate", {"lora_path": None}))["body"] == {"lora_path": None}
    with pytest.raises(UnnamedAdapter, match="names none of the adapters a, b and is made outside of the"):
        await post(f"{root}/generate", {})
    init_http_client(plugin_args(**where))  # engines that have none


async def test_a_header_cannot_bring_another_one(server):
    for headers in ({"X": "a\r\nAuthorization: b"}, {"X\n": "a"}, {"X": "\u20ac"}):
        with pytest.raises(httpx.UnsupportedProtocol, match=server.url):
            await post(server.url, {}, headers=headers)
    assert server.requests == 0


@pytest.mark.parametrize(
    ("written", "meant"), [("user:pass", b"user:pass"), ("a%40b:c%3Ad%25", b"a@b:c:d%"), ("key", b"key:")]
)
async def test_user_and_password_of_a_url_are_shown(server, written, meant):
    url = server.url.replace("http://", f"http://{written}@")
    assert base64.b64decode((await post(url, {}))["key"].removeprefix("Basic ")) == meant


@pytest.mark.parametrize("url", ["10.0.0.1:80/x", "ftp://127.0.0.1/x", "http:///x"])
async def test_what_is_no_address_is_named_and_not_tried_again(url):
    with pytest.raises(httpx.UnsupportedProtocol) as caught:
        await post(url, {})
    assert url in str(caught.value)


async def test_an_answer_in_a_coding_that_nobody_asked_for_is_refused(server):
    server.content_encoding = "br"
    with pytest.raises(httpx.UnsupportedProtocol, match=r"encoded as br \(wanted: identity\)"):
        await post(server.url, {})


async def test_who_gives_up_ends_the_connection():
    begun, ended = asyncio.Event(), asyncio.Event()

    async def silent(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        begun.set()
        await reader.read()
        ended.set()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/x"
        asking = asyncio.create_task(post(url, {}))
        async with asyncio.timeout(60):
            await begun.wait()
            asking.cancel()
            await ended.wait()


def test_each_event_loop_gets_a_client_of_its_own(server):
    for _ in range(2):
        assert asyncio.run(post(server.url, {"a": 1}))["body"] == {"a": 1}


def test_available_ports_are_free_and_consecutive():
    with socket.socket() as taken:
        taken.bind(("", free_port()))  # which nobody takes as soon as it is free again
        taken.listen()
        port = taken.getsockname()[1]
        assert not http_utils.is_port_available(port)
        assert http_utils.find_available_port(port) > port
        assert http_utils.find_available_port(port - 1, consecutive=2) > port
    assert http_utils.is_port_available(port)


def test_a_search_without_a_result_says_what_it_looked_for():
    with pytest.raises(RuntimeError, match="no 3 consecutive free ports between 65534 and 65535"):
        http_utils.find_available_port(65534, consecutive=3)


def test_the_configured_address_wins(monkeypatch):
    monkeypatch.setenv("SLIME_HOST_IP", "10.1.2.3")
    assert http_utils.get_host_info() == (socket.gethostname(), "10.1.2.3")


def test_the_address_is_one_of_this_machine(monkeypatch):
    monkeypatch.delenv("SLIME_HOST_IP", raising=False)
    address = http_utils.get_host_info()[1]
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_loopback_hosts(host):
    assert http_utils.is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "node-3", "::", ""])
def test_hosts_that_others_can_reach(host):
    assert not http_utils.is_loopback(host)


def test_urls_bracket_ipv6():
    assert http_utils.http_url("fe80::1", 80) == "http://[fe80::1]:80"
    assert http_utils.http_url("[fe80::1]", 80) == "http://[fe80::1]:80"
    assert http_utils.http_url("10.0.0.1", 80) == "http://10.0.0.1:80"


@pytest.mark.parametrize(("gpus", "per_engine", "engines"), [(8, 2, 4), (0, 1, 1), (2, 4, 1)])
def test_number_of_engines(gpus, per_engine, engines):
    args = plugin_args(rollout_num_gpus=gpus, rollout_num_gpus_per_engine=per_engine)
    assert http_utils.get_rollout_num_engines(args) == engines


class Streaming(BaseHTTPRequestHandler):
    """Sends what ``server.script`` says: bytes, or None to break the connection."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.requests += 1
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        self.send_response(status)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for data in self.server.script:
            if data is None:
                self.close_connection = True
                return
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *arguments):
        pass


@pytest.fixture
def events(server):
    server.RequestHandlerClass = Streaming
    return server


async def collected(server, **options):
    return [event async for event in stream(server.url, {"a": 1}, **options)]


async def test_events_are_parsed_up_to_the_last_one_however_they_are_cut(events):
    whole = b': a comment\n\ndata: {"n": 1}\n\ndata:{"n": "\xc3\xa9"}\n\ndata: [DONE]\n\ndata: {"n": 3}\n\n'
    events.script = [whole[:20], whole[20:40], whole[40:]]
    assert await collected(events) == [{"n": 1}, {"n": "é"}]


async def test_a_stream_is_opened_again_until_it_begins(events):
    events.statuses, events.script = [503, 429], [b'data: {"n": 1}\n\n']
    assert await collected(events, max_retries=2) == [{"n": 1}]
    assert events.requests == 3
    events.statuses = [400]
    with pytest.raises(HttpStatusError, match="HTTP 400"):
        await collected(events, max_retries=2)


@pytest.mark.parametrize("end", [[None], [b'data: {"n": 2']])
async def test_a_stream_that_breaks_is_an_error_with_its_url(events, end):
    """Also where HTTP knows of no break, as its end is that of the connection."""
    events.script = [b'data: {"n": 1}\n\n', *end]
    seen = []
    with pytest.raises(httpx.TransportError, match=events.url):
        async for event in stream(events.url, {}, max_retries=3):
            seen.append(event)
    assert seen == [{"n": 1}] and events.requests == 1
