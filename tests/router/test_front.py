"""What passes through the router, and what it says itself."""

import asyncio
import gzip
import json
from types import SimpleNamespace

import aiohttp
import pytest
from fastapi.responses import Response, StreamingResponse

from slime.router import front as front_module
from slime.router.metrics import Counts
from slime.router.pool import WorkerPool
from slime.router.settings import RouterSettings
from slime.router.upstream import Connections, Upstream
from tests.engines import free_port
from tests.engines.fake import Call, FakeEngine
from tests.router.conftest import router_args, served

GENERATE = {"input_ids": [1, 2, 3], "sampling_params": {"custom_params": {"a": 1}, "no_such": 2}}


def generations(engine: FakeEngine) -> list[Call]:
    """Returns the calls without the health checks, which come at any time."""
    return [call for call in engine.calls if call.path == "generate"]


async def test_a_request_and_its_answer_pass_byte_by_byte(start_engine) -> None:
    engine, seen = start_engine(), {}
    odd = b'{ "routed_experts":"AAAA",\n "meta_info" : {"x":1.0} }'  # no library writes it like this

    def answer(body):
        seen["body"] = body
        return Response(odd, status_code=201, media_type="application/json", headers={"X-Of-Engine": "e"})

    engine.answers["generate"] = answer
    async with served() as router:
        await router.add(engine)
        text = b'{"return_routed_experts":true ,  "unknown": [1,2,3], "input_ids":[5]}'
        headers = {"X-Of-Client": "c", "Content-Type": "application/json"}
        async with router.client.post("/generate?a=%2F&b", data=text, headers=headers) as got:
            assert (got.status, await got.read()) == (201, odd)
            assert got.headers["X-Of-Engine"] == "e"
        assert seen["body"] == json.loads(text)
        (call,) = generations(engine)
        assert call.headers["x-of-client"] == "c"
        assert call.headers["content-length"] == str(len(text))


async def test_what_connection_names_goes_no_further(start_engine) -> None:
    engine = start_engine()
    engine.answers["generate"] = Response(b"{}", headers={"Connection": "X-Hop", "X-Hop": "e", "X-End": "e"})
    async with served() as router:
        await router.add(engine)
        headers = {"Connection": "x-first , X-Second", "X-First": "1", "X-Second": "2", "X-Third": "3"}
        async with router.client.post("/generate", json=GENERATE, headers=headers) as got:
            assert got.headers["X-End"] == "e" and "X-Hop" not in got.headers
    (call,) = generations(engine)
    seen = {name.lower() for name in call.headers}
    assert "x-third" in seen and not {"x-first", "x-second"} & seen


async def test_compressed_bodies_stay_as_they_are(start_engine) -> None:
    engine = start_engine()
    packed = gzip.compress(b'{"text": "a"}')
    engine.answers["generate"] = Response(packed, headers={"Content-Encoding": "gzip"})
    async with served() as router:
        await router.add(engine)
        async with (
            aiohttp.ClientSession(auto_decompress=False) as raw,
            raw.post(f"{router.url}/generate", json=GENERATE) as got,
        ):
            assert got.headers["Content-Encoding"] == "gzip" and await got.read() == packed


@pytest.mark.parametrize("size", [0, 2**20, 5 * 2**20])
async def test_bodies_of_any_size_pass_in_both_directions(size: int, start_engine) -> None:
    engine = start_engine()
    engine.answers["generate"] = lambda body: {"text": body["text"]}
    async with served() as router:
        await router.add(engine)
        status, answer = await router.post("/generate", text="x" * size)
        assert status == 200 and len(answer["text"]) == size


async def test_events_of_a_stream_come_one_by_one(start_engine) -> None:
    engine, go_on = start_engine(), asyncio.Event()
    loop = asyncio.get_running_loop()

    async def events():
        for number in range(3):
            yield f"data: {number}\n\n"
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(go_on.wait(), loop))

    engine.answers["generate"] = lambda body: StreamingResponse(events(), media_type="text/event-stream")
    async with served() as router:
        await router.add(engine)
        async with router.client.post("/generate", json=GENERATE) as got:
            assert got.headers["Content-Type"].startswith("text/event-stream")
            assert await got.content.readuntil(b"\n\n") == b"data: 0\n\n"  # the engine waits for us
            go_on.set()
            assert await got.read() == b"data: 1\n\ndata: 2\n\n"


async def test_the_engine_learns_that_the_client_has_gone(start_engine) -> None:
    engine = start_engine()
    began, ended = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    async def endless():
        try:
            while True:
                yield b"data: 1\n\n"
                loop.call_soon_threadsafe(began.set)
                await asyncio.sleep(0.01)
        finally:
            loop.call_soon_threadsafe(ended.set)

    engine.answers["generate"] = lambda body: StreamingResponse(endless(), media_type="text/event-stream")
    async with served() as router:
        await router.add(engine)
        async with asyncio.timeout(60):
            got = await router.client.post("/generate", json=GENERATE)
            await began.wait()
            got.close()
            await ended.wait()
            while router.router.worker_request_counts != {engine.url: 0}:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(("given", "limits"), [(None, [2, 2, 4]), (7, [4, 4, 4])])
async def test_connections_are_of_the_engines_that_are_there_unless_a_flag_says(
    given: int | None, limits: list[int]
) -> None:
    flags = dict(slime_router_processes=2, sglang_server_concurrency=4, slime_router_max_connections=given)
    pool = WorkerPool(1)
    upstream = Upstream(pool, RouterSettings.of(router_args(**flags)), Counts())
    found = [upstream._limit()]
    for number in range(2):
        pool.add(f"http://engine{number}")
        found.append(upstream._limit())
    assert found == limits


async def test_a_connection_serves_one_request_after_the_other_unless_an_answer_is_left() -> None:
    clients = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clients.append(writer)
        while head := await reader.readline():
            while await reader.readline() != b"\r\n":
                pass
            length = 100 if b"/long" in head else 2
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n{}" % length)

    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with await asyncio.start_server(serve, "127.0.0.1", port):
        connections = Connections(limit=1)
        for target, expected in [(b"/", 1), (b"/", 1), (b"/long", 1), (b"/", 2), (b"/", 2)]:
            reply = await connections.ask(url, b"GET", target, [], b"")
            if target == b"/":
                assert await reply.read() == b"{}"
            connections.finish(url, reply)
            assert len(clients) == expected
        connections.close()
        for writer in clients:
            writer.close()


@pytest.fixture
async def listener():
    """A server that keeps what it gets, answers health checks only, and tells when a client has gone."""
    got: list[bytes] = []
    begun, ended = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            writer.close()
            return
        begun.set()
        while part := await reader.read(2**16):
            got.append(part)
        ended.set()
        writer.close()

    port = free_port()
    async with await asyncio.start_server(serve, "127.0.0.1", port):
        yield SimpleNamespace(url=f"http://127.0.0.1:{port}", got=got, begun=begun, ended=ended)


async def test_who_goes_away_before_the_answer_ends_the_work_and_compressed_requests_stay_so(
    listener,
) -> None:
    packed = gzip.compress(b'{"text": "a"}' * 9)
    async with served() as router:
        await router.add(listener)
        headers = {"Content-Encoding": "gzip"}
        asking = asyncio.create_task(router.client.post("/generate", data=packed, headers=headers))
        async with asyncio.timeout(60):
            await listener.begun.wait()
            asking.cancel()
            await listener.ended.wait()
        assert b"".join(listener.got) == packed


async def test_errors_of_the_engine_are_the_engines(start_engine) -> None:
    engine = start_engine()
    engine.answers["generate"] = Response("no such parameter", status_code=400)
    async with served() as router:
        await router.add(engine)
        async with router.client.post("/generate", json=GENERATE) as got:
            assert (got.status, await got.text()) == (400, "no such parameter")
        assert len(engine.seen("generate")) == 1, "it is not asked again"


async def test_nobody_to_ask_is_a_503_with_the_reason(start_engine) -> None:
    async with served() as router:
        status, answer = await router.post("/generate", **GENERATE)
        assert (status, answer["error"]["message"]) == (503, "no worker is registered")
        engine = start_engine()
        await router.add(engine)
        engine.stop()
        status, answer = await router.post("/generate", **GENERATE)
        assert status == 503 and engine.url in answer["error"]["message"]


async def test_a_refused_connection_is_tried_elsewhere(start_engine) -> None:
    dead, alive = start_engine(), start_engine()
    async with served(rollout_health_check_interval=100.0) as router:
        await router.add(dead, alive)
        dead.stop()
        answers = await asyncio.gather(*(router.post("/generate", **GENERATE) for _ in range(20)))
        assert {status for status, _ in answers} == {200}
        assert len(alive.seen("generate")) == 20


async def test_an_answer_that_was_begun_is_not_asked_for_again(start_engine) -> None:
    """Its engine ends the connection after the request: tokens may have been sampled."""
    engine = start_engine()
    heard = []

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        else:
            heard.append(head)
            writer.write(heard_answer)
        await writer.drain()
        writer.close()

    port = free_port()
    async with await asyncio.start_server(hang_up, "127.0.0.1", port), served() as router:
        engine_at_port = type("At", (), {"url": f"http://127.0.0.1:{port}"})
        await router.add(engine_at_port)
        heard_answer = b""
        status, answer = await router.post("/generate", **GENERATE)
        assert (status, answer["error"]["type"], len(heard)) == (502, "worker_broke_off", 1)
        heard_answer = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}"
        status, answer = await router.post("/generate", **GENERATE)
        assert (status, answer["error"]["type"], len(heard)) == (502, "worker_broke_off", 2)
        heard_answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
        with pytest.raises(aiohttp.ClientError):
            await router.post("/generate", **GENERATE)
        assert len(heard) == 3 and engine.seen("generate") == []
        assert router.router.worker_request_counts == {engine_at_port.url: 0}


async def test_an_engine_has_so_much_time_and_no_more(start_engine) -> None:
    engine = start_engine()

    async def never(body):
        await asyncio.Event().wait()

    engine.answers["generate"] = never
    async with served(slime_router_timeout=0.1) as router:
        await router.add(engine)
        status, answer = await router.post("/generate", **GENERATE)
        assert status == 504 and "--slime-router-timeout" in answer["error"]["message"]


async def test_requests_of_a_session_go_to_one_engine(start_engine) -> None:
    engines = [start_engine() for _ in range(3)]
    async with served() as router:
        await router.add(*engines)
        for session in ("a", "b", "c", "d"):
            for engine in engines:
                engine.calls.clear()
            for _ in range(4):
                await router.post("/generate", headers={"X-SMG-Routing-Key": session}, **GENERATE)
            assert sorted(len(engine.seen("generate")) for engine in engines) == [0, 0, 4]


async def test_least_in_flight_fills_the_idle_engine(start_engine) -> None:
    engines = [start_engine() for _ in range(2)]
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def wait(body):
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(release.wait(), loop))
        return {}

    for engine in engines:
        engine.answers["generate"] = wait
    async with served() as router:
        await router.add(*engines)
        tasks = [asyncio.create_task(router.post("/generate", **GENERATE)) for _ in range(10)]
        async with asyncio.timeout(60):
            while sum(router.router.worker_request_counts.values()) < 10:
                await asyncio.sleep(0.01)
        assert list(router.router.worker_request_counts.values()) == [5, 5]
        _, listing = await router.get("/workers")
        assert [worker["load"] for worker in listing["workers"]] == [5, 5]
        release.set()
        await asyncio.gather(*tasks)
    assert list(router.router.worker_request_counts.values()) == [0, 0]


async def test_the_key_is_asked_of_clients_and_shown_to_engines(start_engine) -> None:
    engine, other = start_engine(api_key="K"), start_engine(api_key="of this one")
    async with served(sglang_api_key="K") as router:
        for headers in ({}, {"Authorization": "Bearer k"}, {"Authorization": "K"}):
            status, _ = await router.post("/generate", headers=headers, **GENERATE)
            assert status == 401
        for path in ("/health", "/liveness", "/metrics"):
            async with router.client.get(path) as got:
                assert got.status == 200
        key = {"Authorization": "Bearer K"}
        for body in ({"url": engine.url}, {"url": other.url, "api_key": "of this one"}):
            async with router.client.post("/workers", json=body, headers=key) as got:
                assert got.status == 202
        for _ in range(4):
            status, _ = await router.post("/generate", headers=key, **GENERATE)
            assert status == 200
        assert len(engine.seen("generate")) == len(other.seen("generate")) == 2


async def test_workers_are_added_listed_and_removed_in_both_manners(start_engine) -> None:
    first, second, third = (start_engine() for _ in range(3))
    async with served() as router:
        status, added = await router.post("/workers", url=first.url)
        assert status == 202 and added["status"] == "accepted"
        again = await router.post("/workers", url=first.url)
        assert again == (202, added)
        assert (await router.post("/add_worker", url=second.url))[1] == {
            "status": "success",
            "worker_urls": {first.url: 0, second.url: 0},
        }
        async with router.client.post("/add_worker", params={"worker_url": third.url}) as got:
            assert got.status == 200
        assert await router.get("/list_workers") == (200, {"urls": [first.url, second.url, third.url]})
        for bad in ({}, {"url": "10.0.0.1"}):
            assert (await router.post("/add_worker", **bad))[0] == 400
            assert (await router.post("/workers", **bad))[0] == 400
        status, answer = await router.post("/workers", url=first.url, worker_type="prefill")
        assert status == 400 and "prefill" in answer["error"]["message"]
        async with router.client.delete(f"/workers/{added['worker_id']}") as got:
            assert got.status == 202
        async with router.client.delete(f"/workers/{added['worker_id']}") as got:
            assert got.status == 404
        assert (await router.post("/remove_worker", url=second.url))[0] == 200
        _, listing = await router.get("/workers")
        assert [(w["url"], w["is_healthy"]) for w in listing["workers"]] == [(third.url, True)]


async def test_a_worker_that_does_not_answer_yet_serves_once_it_does(start_engine) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with served() as router:
        await router.post("/workers", url=url)
        assert (await router.get("/readiness"))[0] == 503
        assert (await router.post("/generate", **GENERATE))[0] == 503
        engine = start_engine(port=port)
        async with asyncio.timeout(60):
            while (await router.get("/readiness"))[0] != 200:
                await asyncio.sleep(0.02)
        assert (await router.post("/generate", **GENERATE))[0] == 200
        assert len(engine.seen("generate")) == 1


async def test_a_sick_engine_is_quarantined_until_it_has_newer_weights(start_engine) -> None:
    engine = start_engine()
    engine.weight_version = "3"
    async with served() as router:
        await router.add(engine)

        async def until(state: str) -> None:
            async with asyncio.timeout(60):
                while (await router.get("/workers"))[1]["workers"][0]["state"] != state:
                    await asyncio.sleep(0.02)

        engine.answers["health"] = Response(status_code=503)
        await until("quarantined")
        status, answer = await router.post("/generate", **GENERATE)
        assert status == 503 and "/health answers 503" in answer["error"]["message"]
        assert router.router.dead_workers == {engine.url}
        engine.answers["health"] = {}
        checks = len(engine.seen("model_info"))
        async with asyncio.timeout(60):
            while len(engine.seen("model_info")) < checks + 3:  # it is well, and looked at
                await asyncio.sleep(0.02)
        assert router.router.dead_workers == {engine.url}
        engine.weight_version = "4"
        await until("serving")
        assert (await router.post("/generate", **GENERATE))[0] == 200


async def test_the_metrics_count_what_happened(start_engine) -> None:
    engine = start_engine()
    async with served() as router:
        await router.post("/generate", **GENERATE)
        await router.add(engine)
        await router.post("/generate", **GENERATE)
        async with router.client.get("/metrics") as got:
            lines = (await got.text()).splitlines()
    assert 'slime_router_requests_total{status="200"} 1' in lines
    assert 'slime_router_requests_total{status="503"} 1' in lines
    assert "slime_router_refusals_total 1" in lines
    assert f'slime_router_worker_requests_in_flight{{worker="{engine.url}"}} 0' in lines
    assert 'slime_router_workers{state="serving"} 1' in lines


async def test_without_the_middleware_there_is_no_tree(start_engine) -> None:
    async with served() as router:
        status, answer = await router.post("/retrieve_from_text", text="a")
        assert status == 404 and answer["error"]["message"] == front_module.NO_TREE
