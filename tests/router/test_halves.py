"""Requests that one engine prefills and another one decodes."""

import asyncio
import json
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi.responses import JSONResponse, Response, StreamingResponse

from slime.router.pool import WorkerKind, WorkerPool
from tests.engines.fake import FakeEngine
from tests.router.conftest import LONGEST, Served, served

PORT = 8998
OF_DECODE = b'{ "text":"b" ,"meta_info":{"x":1.0}}'  # no library writes it like this


async def register(router: Served, url: str, kind: str) -> None:
    body = {"url": url, "worker_type": kind} | ({"bootstrap_port": PORT} if kind == "prefill" else {})
    async with router.client.post("/workers", json=body) as answer:
        assert answer.status == 202, await answer.text()


def meeting(decode: FakeEngine, *prefills: FakeEngine, answer: Any = None, path: str = "generate") -> None:
    """Has an engine answer only when one that prefills knows the room, as SGLang's have to."""

    async def met(body: dict[str, Any]) -> Any:
        room = body["bootstrap_room"]
        while not any(
            room == other["bootstrap_room"] for engine in prefills for other in bodies(engine, path)
        ):
            await asyncio.sleep(0.005)
        return answer if answer is not None else {"text": "b"}

    decode.answers[path] = met
    for engine in prefills:
        engine.answers[path] = {}


@asynccontextmanager
async def halves(prefill: FakeEngine, decode: FakeEngine, **changes: Any):
    async with served(**changes) as router:
        await register(router, prefill.url, "prefill")
        await register(router, decode.url, "decode")
        yield router


def bodies(engine: FakeEngine, path: str = "generate") -> list[dict[str, Any]]:
    return [call.body for call in engine.calls if call.path == path]


async def test_both_meet_in_a_room_of_their_own_and_the_second_one_answers(start_engine) -> None:
    prefill, decode = start_engine("p"), start_engine()
    meeting(decode, prefill, answer=Response(OF_DECODE, media_type="application/json"))
    async with served() as router:
        body = {"url": prefill.url, "worker_type": "prefill", "bootstrap_port": PORT, "api_key": "p"}
        async with router.client.post("/workers", json=body) as added:
            assert added.status == 202
        await register(router, decode.url, "decode")
        for text in (b'  {"input_ids":[5], "unknown": 1}', b"{ }"):
            async with router.client.post("/generate", data=text) as got:
                assert (got.status, await got.read()) == (200, OF_DECODE)
        listed = (await router.get("/workers"))[1]["workers"]
        assert [(row["worker_type"], row["load"]) for row in listed] == [("prefill", 0), ("decode", 0)]
    seen = list(zip(bodies(prefill), bodies(decode), strict=True))
    assert all(first == second for first, second in seen)
    for first, _ in seen:
        assert (first["bootstrap_host"], first["bootstrap_port"]) == ("127.0.0.1", PORT)
    rooms = [first["bootstrap_room"] for first, _ in seen]
    assert len(set(rooms)) == 2 and all(0 <= room < 2**63 for room in rooms)
    assert (seen[0][0]["input_ids"], seen[0][0]["unknown"]) == ([5], 1)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/generate", {"text": ["a", "b", "c"]}),
        ("/generate", {"input_ids": [[1], [2, 3], [4]]}),
        ("/v1/completions", {"prompt": ["a", "b", "c"], "model": "m"}),
    ],
)
async def test_each_of_several_prompts_has_a_room(path: str, asked, start_engine) -> None:
    prefill, decode = start_engine(), start_engine()
    meeting(decode, prefill, path=path[1:])
    async with halves(prefill, decode) as router:
        assert (await router.post(path, **asked))[0] == 200
    (first,), (second,) = bodies(prefill, path[1:]), bodies(decode, path[1:])
    assert first == second and first["bootstrap_port"] == [PORT] * 3
    assert len(set(first["bootstrap_room"])) == len(first["bootstrap_host"]) == 3


async def test_log_probs_of_the_prompt_come_from_the_one_that_has_read_it(start_engine) -> None:
    prefill, decode = start_engine(), start_engine()
    rows = [[-0.1, 1, None], [-0.25, 2, None], [-0.5, 3, None]]
    prefill.answers["generate"] = {"text": "", "meta_info": {"input_token_logprobs": rows[:2]}}
    meta = {"input_token_logprobs": rows[2:], "output_token_logprobs": [[-1.5, 4, None]]}
    decode.answers["generate"] = {"text": "b", "meta_info": meta}
    async with halves(prefill, decode) as router:
        status, answer = await router.post("/generate", input_ids=[1, 2, 3], return_logprob=True)
        assert status == 200 and answer["text"] == "b"
        assert answer["meta_info"] == meta | {"input_token_logprobs": rows}
        status, answer = await router.post("/generate", input_ids=[1, 2, 3])
        assert answer["meta_info"] == meta
        decode.answers["generate"] = Response(OF_DECODE, media_type="application/json")
        prefill.answers["generate"] = {"text": "", "meta_info": {}}
        async with router.client.post("/generate", json={"input_ids": [1], "return_logprob": True}) as got:
            assert await got.read() == OF_DECODE


async def test_streams_are_those_of_the_one_that_decodes(start_engine) -> None:
    prefill, decode, gate = start_engine(), start_engine(), asyncio.Event()
    loop = asyncio.get_running_loop()

    async def events():
        yield b"data: 1\n\n"
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(gate.wait(), loop))
        yield b"data: 2\n\n"

    decode.answers["generate"] = lambda body: StreamingResponse(events(), media_type="text/event-stream")
    async with halves(prefill, decode) as router:
        asked = {"input_ids": [1], "stream": True, "return_logprob": True}
        async with asyncio.timeout(LONGEST), router.client.post("/generate", json=asked) as got:
            assert await got.content.readany() == b"data: 1\n\n"
            gate.set()
            assert await got.read() == b"data: 2\n\n"


@pytest.mark.parametrize("refusing", [0, 1])
async def test_a_refusal_of_either_half_is_the_answer_and_ends_the_other(refusing: int, start_engine) -> None:
    engines = [start_engine(), start_engine()]
    engines[refusing].answers["generate"] = JSONResponse({"error": "too long"}, 400)
    never = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def waits(body):
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(never.wait(), loop))
        return {}

    engines[1 - refusing].answers["generate"] = waits
    async with halves(*engines) as router:
        async with asyncio.timeout(LONGEST):
            assert await router.post("/generate", input_ids=[1, 2]) == (400, {"error": "too long"})
            while any(worker.in_flight for worker in router.router.pool):
                await asyncio.sleep(0.01)
    never.set()


async def test_a_client_that_goes_away_while_halves_end_leaves_none_of_them(start_engine) -> None:
    """As one does that closes its connection after each answer."""
    prefill, decode, ending = start_engine(), start_engine(), asyncio.Event()
    async with halves(prefill, decode) as router:
        upstream = router.router.upstream
        connections, held, finished = upstream._connections, asyncio.Event(), list[str]()
        finish = connections.finish_half

        async def slow(base: str, head: Any) -> None:
            ending.set()
            await held.wait()
            await finish(base, head)
            finished.append(base)

        async def client() -> None:
            async with upstream.answer(b"POST", b"/generate", [], b'{"input_ids": [1]}'):
                pass

        connections.finish_half = slow
        async with asyncio.timeout(LONGEST):
            task = asyncio.create_task(client())
            await ending.wait()
            assert not any(worker.in_flight for worker in router.router.pool)
            task.cancel()
            assert isinstance(*await asyncio.gather(task, return_exceptions=True), asyncio.CancelledError)
            held.set()
            while sorted(finished) != sorted([prefill.url, decode.url]):
                await asyncio.sleep(0.005)
        assert connections._free._taken == 0


@pytest.mark.parametrize("away", ["prefill", "decode"])
async def test_another_one_takes_the_place_of_a_half_that_cannot_be_connected_to(
    away: str, start_engine
) -> None:
    prefill, decode, other = start_engine(), start_engine(), start_engine()
    gone, staying = (prefill, decode) if away == "prefill" else (decode, prefill)
    for engine in (decode, other) if away == "decode" else (decode,):
        meeting(engine, prefill, *([other] if away == "prefill" else []))
    async with halves(prefill, decode, rollout_health_check_interval=3600.0) as router:
        await register(router, other.url, away)
        gone.stop()
        for _ in range(3):
            assert (await router.post("/generate", input_ids=[1, 2]))[0] == 200
        rooms = [{body["bootstrap_room"] for body in bodies(engine)} for engine in (other, staying)]
        assert len(rooms[0]) == 3 and rooms[0] <= rooms[1]
        assert not any(worker.in_flight for worker in router.router.pool)


async def test_without_both_halves_nothing_is_asked_and_the_reason_is_told(start_engine) -> None:
    prefill = start_engine()
    async with served() as router:
        await register(router, prefill.url, "prefill")
        status, answer = await router.post("/generate", input_ids=[1, 2])
        assert status == 503 and "no worker is registered that does the decode" in json.dumps(answer)
        async with router.client.post("/flush_cache") as got:
            assert got.status == 200, "what is no generation goes to anybody"
    assert bodies(prefill) == []


async def test_bodies_that_cannot_be_halved_are_refused(start_engine) -> None:
    prefill, decode = start_engine(), start_engine()
    async with halves(prefill, decode) as router:
        for body in (b"", b"[1]", b"{", b'"a"'):
            async with router.client.post("/generate", data=body) as got:
                assert got.status == 400, body
    assert bodies(prefill) == bodies(decode) == []


async def test_whole_engines_and_halves_are_not_mixed(start_engine) -> None:
    prefill, decode, whole = start_engine(), start_engine(), start_engine()
    async with halves(prefill, decode) as router:
        status, answer = await router.post("/workers", url=whole.url)
        assert status == 400 and "decode, prefill" in answer["error"]["message"]
        assert (await router.post("/add_worker", url=whole.url))[0] == 400
    async with served() as router:
        await router.add(whole)
        assert (await router.post("/workers", url=decode.url, worker_type="decode"))[0] == 400
        status, answer = await router.post("/workers", url=decode.url, worker_type="encoder")
        assert status == 400 and "regular, prefill, decode" in answer["error"]["message"]
        for port in (0, 2**16, "8998"):
            said = await router.post("/workers", url=prefill.url, worker_type="prefill", bootstrap_port=port)
            assert said[0] == 400


async def test_a_session_stays_with_the_one_that_prefills(start_engine) -> None:
    first, second, decode = start_engine(), start_engine(), start_engine()
    meeting(decode, first, second)
    async with halves(first, decode) as router:
        await register(router, second.url, "prefill")
        for _ in range(6):
            await router.post("/generate", {"X-SMG-Routing-Key": "s"}, input_ids=[1, 2])
        assert sorted((len(bodies(first)), len(bodies(second)))) == [0, 6]
        for _ in range(6):
            await router.post("/generate", input_ids=[1, 2])
        assert bodies(first) and bodies(second)


def test_other_processes_know_which_half_a_worker_does() -> None:
    pool, other = WorkerPool(3), WorkerPool(3)
    for url, kind in (("http://a:1", WorkerKind.PREFILL), ("http://b:1", WorkerKind.DECODE)):
        pool.report(pool.add(url, "k", kind, PORT), None, None)
    other.apply(pool.table())
    assert [other.choose(None, (), kind).url for kind in (WorkerKind.PREFILL, WorkerKind.DECODE)] == [
        "http://a:1",
        "http://b:1",
    ]
    assert next(iter(other)).bootstrap_port == PORT and other.has_halves
