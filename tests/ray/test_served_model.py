"""Engines of a model and their router."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from slime.backends.sglang_utils.external import ExternalEngines
from slime.backends.sglang_utils.router import RouterError, RouterProcess, start_router
from slime.ray import engine as engine_module
from slime.ray import engine_watch, served_model
from slime.ray.engine import EngineState
from slime.ray.engine_group import EngineGroup
from slime.ray.engine_watch import EngineWatch, WatchTimes
from slime.ray.served_model import ServedModel
from slime.utils import http_utils
from slime.utils.http_utils import post
from slime.utils.types import EngineEndpoint
from tests.engines import free_port
from tests.engines.fake import FakeEngine
from tests.ray.stand_ins import Cluster, Router, Source, client_class, wait_until
from tests.run_args import config_with

KILLED = "router (http://router): killed by SIGKILL"
HANGS_S = 300.0
"""Bounds a hang; nothing takes so long."""


def launched(cluster: Cluster, *sources: Source, **options: Any) -> ServedModel:
    groups, first = [], 0
    for source in sources:
        groups.append(EngineGroup(source, first_rank=first))
        first += len(source)
    model = ServedModel("default", groups, lambda: Router(cluster), **options)
    model.launch()
    model.wait_ready(5)
    return model


def die(model: ServedModel, rank: int) -> None:
    engine = model.engines[rank]
    engine.become(EngineState.DEAD)
    engine.end()


def test_groups_come_up_together_and_number_their_engines_on() -> None:
    cluster = Cluster()
    model = launched(cluster, Source(cluster, 2), Source(cluster, 1))
    assert [engine.rank for engine in model.engines] == [0, 1, 2]
    assert [engine.url for engine in model.living] == ["http://engine0", "http://engine1", "http://engine2"]
    assert model.launches == 3
    assert cluster.routed == []


def test_a_replacement_is_a_new_engine_in_the_same_place() -> None:
    cluster = Cluster()
    model = launched(cluster, Source(cluster, 2), Source(cluster, 2))
    old = model.engines
    die(model, 2)
    assert model.dead == [old[2]]
    (new,) = model.replace_gone()
    assert new is not old[2] and new.rank == 2
    assert model.engines == [old[0], old[1], new, old[3]]
    assert (new.state, old[2].state) == (EngineState.STARTING, EngineState.DEAD)
    assert model.launches == 5


def test_a_dead_engine_keeps_its_place_until_it_is_gone() -> None:
    cluster = Cluster()
    model = launched(cluster, Source(cluster, 2))
    lost = model.engines[0]
    lost.become(EngineState.DEAD)
    assert model.replace_gone() == []
    lost.end()
    assert [engine.rank for engine in model.replace_gone()] == [0]


def test_an_engine_that_dies_while_it_is_admitted_does_not_stay_in_the_router() -> None:
    cluster = Cluster()
    model = launched(cluster, Source(cluster, 2))

    def die_meanwhile(url: str) -> None:
        model.engines[0].become(EngineState.DEAD)
        model.dismiss(model.engines[0])  # too early: it is not listed yet

    cluster.on_register = die_meanwhile
    model.admit(model.engines[0])
    assert cluster.routed == [] and model.engines[0].state is EngineState.DEAD


def test_a_router_that_refuses_an_engine_is_an_error_unless_the_engine_has_died() -> None:
    cluster = Cluster()
    model = launched(cluster, Source(cluster, 2))

    def refuse(url: str) -> None:
        if url == "http://engine1":
            model.engines[1].become(EngineState.DEAD)
        raise RouterError(f"waited 60 s for it to list {url}")

    cluster.on_register = refuse
    with pytest.raises(RouterError, match="engine0"):
        model.admit(model.engines[0])
    model.admit(model.engines[1])
    assert [engine.state for engine in model.engines] == [EngineState.READY, EngineState.DEAD]


def serving(cluster: Cluster, count: int, **options: Any) -> ServedModel:
    """A model of so many engines, of which all but the last serve."""
    model = launched(cluster, Source(cluster, count), **options)
    for engine in model.engines[:-1]:
        model.admit(engine)
    return model


def ended(model: ServedModel) -> Any:
    """The router, which has ended."""
    router: Any = model.router
    router.cluster.router_ended = KILLED
    return router


def test_a_router_that_has_ended_is_started_again_and_told_of_the_engines_that_serve() -> None:
    cluster = Cluster()
    model = serving(cluster, 4, router_restarts=1)
    die(model, 1)
    router = ended(model)
    assert model.restart_router(router) and model.router is not router
    assert sorted(cluster.routed) == ["http://engine0", "http://engine2"]
    assert cluster.requests == [("router", "shutdown")]  # of one that was stopped there is something left
    assert model.restart_router(router), "another one is in its place already"
    assert not model.restart_router(model.router), "it runs"
    model.admit(model.engines[3])
    assert cluster.routed == ["http://engine0", "http://engine2", "http://engine3"]


@pytest.mark.parametrize("method", ["admit", "dismiss"])
def test_who_finds_the_router_ended_has_it_started_again(method: str) -> None:
    cluster = Cluster()
    model = serving(cluster, 3, router_restarts=1)
    ended(model)
    engine = model.engines[2 if method == "admit" else 0]
    if method == "dismiss":
        engine.become(EngineState.DEAD)
    getattr(model, method)(engine)
    assert cluster.routed == [f"http://engine{rank}" for rank in ((0, 1, 2) if method == "admit" else (1,))]


def test_a_request_that_a_router_breaks_off_waits_until_its_end_is_seen(monkeypatch) -> None:
    cluster = Cluster()
    model = serving(cluster, 2, router_restarts=1)
    router: Any = model.router

    def broken(url: str) -> None:
        cluster.on_register = lambda url: None
        threading.Timer(0.3, setattr, [cluster, "router_ended", KILLED]).start()
        raise RouterError("connection reset by peer")

    cluster.on_register = broken
    model.admit(model.engines[1])
    assert model.router is not router and cluster.routed == ["http://engine0", "http://engine1"]


def test_an_engine_that_is_admitted_while_the_router_is_replaced_is_known_to_the_new_one() -> None:
    cluster = Cluster()
    model = serving(cluster, 2, router_restarts=1)
    router: Any = model.router

    def replaced_meanwhile(url: str) -> None:
        cluster.on_register = lambda url: None
        cluster.router_ended = KILLED
        model.restart_router(router)
        cluster.routed.append(url)  # by the one before, which knew it until its end
        cluster.routed.clear()
        cluster.routed.append("http://engine0")

    cluster.on_register = replaced_meanwhile
    model.admit(model.engines[1])
    assert set(cluster.routed) == {"http://engine0", "http://engine1"}
    assert model.engines[1].state is EngineState.SERVING


@pytest.mark.parametrize("listed", [True, False], ids=["in the end", "never"])
def test_an_engine_that_dies_while_a_new_router_is_told_of_it_does_not_stay_there(listed: bool) -> None:
    cluster = Cluster()
    model = serving(cluster, 3, router_restarts=1)

    def die_meanwhile(url: str) -> None:
        if url == "http://engine0":
            model.engines[0].become(EngineState.DEAD)
            model.dismiss(model.engines[0])  # too early
            if not listed:
                raise RouterError("waited 60 s for it to list http://engine0")

    cluster.on_register = die_meanwhile
    model.restart_router(ended(model))
    assert cluster.routed == ["http://engine1"]


def test_a_new_router_keeps_an_address_that_a_successor_has_by_now() -> None:
    cluster = Cluster()
    model = serving(cluster, 3, router_restarts=1)
    first = model.engines[0]

    def replaced_meanwhile(url: str) -> None:
        if url != "http://engine0" or model.engines[0] is not first:
            return
        die(model, 0)
        model.replace_gone()
        model.wait_ready(5)
        model.admit(model.engines[0])
        raise RouterError("waited 60 s for it to list http://engine0")

    cluster.on_register = replaced_meanwhile
    model.restart_router(ended(model))
    assert sorted(cluster.routed) == ["http://engine0", "http://engine1"]


def test_a_new_router_that_does_not_take_an_engine_that_lives_is_replaced_too(monkeypatch) -> None:
    monkeypatch.setattr(served_model, "_RESTART_PAUSE", 0.01)
    cluster = Cluster()
    monkeypatch.setattr(engine_module, "EngineClient", client_class(cluster))
    model = serving(cluster, 3, router_restarts=2)
    refused = []

    def refuse_once(url: str) -> None:
        if url == "http://engine0" and not refused:
            refused.append(url)
            raise RouterError("waited 60 s for it to list it")

    cluster.on_register = refuse_once
    model.restart_router(ended(model))
    assert sorted(cluster.routed) == ["http://engine0", "http://engine1"] and refused == ["http://engine0"]


def test_engines_do_not_wait_until_a_new_router_has_been_told_of_one_that_hangs() -> None:
    cluster = Cluster()
    model = serving(cluster, 3, router_restarts=1)
    other_is_listed = threading.Event()

    def wait(url: str) -> None:
        if url == "http://engine0":
            assert other_is_listed.wait(HANGS_S)
        other_is_listed.set()

    cluster.on_register = wait
    assert model.restart_router(ended(model))
    assert sorted(cluster.routed) == ["http://engine0", "http://engine1"]


def without_answer(cluster: Cluster, model: ServedModel, rank: int) -> None:
    """An engine hangs, and the router has ended."""
    url = model.engines[rank].url

    def refuse(other: str) -> None:
        if other == url and not cluster.sick.get(url, True):
            raise RouterError(f"waited 60 s for it to list {url} as healthy")

    cluster.on_register, cluster.sick[url] = refuse, False
    model.restart_router(ended(model))


def test_a_new_router_does_without_an_engine_that_hangs_until_that_answers(monkeypatch) -> None:
    cluster = Cluster()
    monkeypatch.setattr(engine_module, "EngineClient", client_class(cluster))
    model = serving(cluster, 3, router_restarts=2)
    without_answer(cluster, model, 0)
    model.list_missing()
    assert cluster.routed == ["http://engine1"] and model.unlisted == {model.engines[0]}
    cluster.sick.clear()
    model.list_missing()
    assert cluster.routed == ["http://engine1", "http://engine0"] and not model.unlisted
    without_answer(cluster, model, 0)
    die(model, 0)
    cluster.sick.clear()
    model.list_missing()
    assert cluster.routed == ["http://engine1"] and not model.unlisted


def test_the_watch_has_a_router_told_of_an_engine_that_answers_again(monkeypatch) -> None:
    monkeypatch.setattr(engine_watch, "LOOK_INTERVAL", 0.02)
    cluster = Cluster()
    monkeypatch.setattr(engine_module, "EngineClient", client_class(cluster))
    model = serving(cluster, 3, router_restarts=2)
    without_answer(cluster, model, 0)
    watch = EngineWatch([model], WatchTimes(interval=60, timeout=5), tolerant=True)
    watch.start()
    try:
        refusals = iter([RouterError("connection reset by peer")])
        refuse = cluster.on_register

        def refuse_once_more(url: str) -> None:
            refuse(url)
            for error in refusals:
                raise error

        cluster.on_register = refuse_once_more
        cluster.sick.clear()
        wait_until(lambda: cluster.routed == ["http://engine1", "http://engine0"])
        watch.check()
    finally:
        watch.stop()


def test_a_router_that_cannot_be_started_is_tried_again_and_then_ends_the_run(monkeypatch, caplog) -> None:
    monkeypatch.setattr(served_model, "_RESTART_PAUSE", 0.01)
    cluster = Cluster()
    model = serving(cluster, 2, router_restarts=2)
    cluster.router_starts = ["the port is in use", None]
    model.restart_router(ended(model))
    assert cluster.routed == ["http://engine0"]
    assert "the router of model default is started again: the port is in use" in caplog.text
    with pytest.raises(RouterError, match=f"^2 restarts in one rollout did not help: {KILLED[:6]}"):
        model.restart_router(ended(model))
    model.begin_rollout()
    model.restart_router(ended(model))
    assert cluster.routed == ["http://engine0"]


def test_a_router_that_may_not_be_started_again_ends_the_run_by_its_own_name() -> None:
    cluster = Cluster()
    model = serving(cluster, 2)
    with pytest.raises(RouterError, match=r"^router \(http://router\): killed by SIGKILL$"):
        model.restart_router(ended(model))


def test_a_router_that_starts_while_the_run_ends_is_ended_too() -> None:
    cluster = Cluster()
    model = serving(cluster, 2, router_restarts=1)
    router, start = ended(model), model._start_router
    model._start_router = lambda: [start(), model.stop_router()][0]
    model.restart_router(router)
    assert cluster.requests == [("router", "shutdown")] * 3 and cluster.routed == []


@pytest.fixture
def engines() -> Iterator[list[FakeEngine]]:
    """Two, which answer when they are told to."""
    engines = [FakeEngine().start() for _ in range(2)]
    yield engines
    for engine in engines:
        engine.stop()


@pytest.fixture
def routed(
    engines: list[FakeEngine], request, monkeypatch, tmp_path: Path
) -> Iterator[tuple[ServedModel, EngineWatch]]:
    """A model of these engines behind a real router, and the watch of a run that tolerates its death."""
    monkeypatch.setattr(engine_watch, "LOOK_INTERVAL", 0.05)
    monkeypatch.setattr(http_utils, "RETRY_PAUSE_S", 0.05)
    config = config_with(use_slime_router=request.param == "slime")
    where = {"host": "127.0.0.1", "port": free_port(), "prometheus_port": free_port()}
    start = lambda: start_router(config, **where, log_path=tmp_path / "router.log")
    source = ExternalEngines([EngineEndpoint(engine.url, None, 1, None) for engine in engines])
    model = ServedModel("default", [EngineGroup(source)], start, router_restarts=5)
    watch = EngineWatch([model], WatchTimes(interval=60, timeout=5), tolerant=True)
    try:
        model.launch()
        model.wait_ready(60)
        for engine in model.engines:
            model.admit(engine)
        watch.start()
        yield model, watch
    finally:
        watch.stop()
        model.stop_router()


@pytest.mark.slow
@pytest.mark.parametrize("routed", ["stock", "slime"], indirect=True)
async def test_requests_outlive_the_death_of_a_real_router(routed, engines, monkeypatch) -> None:
    """At the same address, as those who have it are not told of another; to each engine as before."""
    model, watch = routed
    go_on = threading.Event()

    async def wait(body: dict[str, Any]) -> dict[str, Any]:
        while not go_on.is_set():
            await asyncio.sleep(0.01)
        return {"output_ids": body["input_ids"][::-1]}

    for engine in engines:
        engine.generate = wait  # type: ignore[method-assign]
    first: RouterProcess = model.router
    tries = int(HANGS_S / http_utils.RETRY_PAUSE_S)  # a router starts as slowly as the machine is busy
    body = lambda number: {"input_ids": [number, 1], "sampling_params": {}}
    ask = lambda number: post(f"{first.url}/generate", body(number), tries)
    under_way = [asyncio.create_task(ask(number)) for number in range(6)]
    reached = lambda: sum(len(engine.seen("generate")) for engine in engines)
    await asyncio.to_thread(wait_until, lambda: reached() == 6, HANGS_S)
    (process,) = psutil.Process(first.process.pid).children()
    os.kill(process.pid, signal.SIGKILL)
    later = [asyncio.create_task(ask(number)) for number in range(6, 12)]
    await asyncio.to_thread(wait_until, lambda: reached() == 18, HANGS_S)
    go_on.set()
    answers = await asyncio.gather(*under_way, *later)
    assert [answer["output_ids"] for answer in answers] == [[1, number] for number in range(12)]
    watch.check()
    second: RouterProcess = model.router
    assert second is not first and second.url == first.url
    # It serves as soon as it knows one of them.
    listed = lambda: {worker["url"] for worker in second.list_workers()}
    await asyncio.to_thread(wait_until, lambda: listed() == {engine.url for engine in engines}, HANGS_S)
