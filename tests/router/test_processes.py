"""Real router processes, started as a run starts them."""

import asyncio
import os
import signal
import socket
import stat
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from slime.backends.sglang_utils.router import RouterError, RouterProcess, start_router
from slime.backends.sglang_utils.router_commands import slime_router_command
from slime.config.run import run_config
from slime.router import processes
from slime.router.processes import Line, Parent
from slime.router.settings import RouterSettings
from slime.utils.async_utils import cancel_all
from tests.engines import free_port
from tests.router.conftest import router_args
from tests.router.test_middleware import RADIX

pytestmark = pytest.mark.slow

HTTP = httpx.Client(timeout=600, limits=httpx.Limits(max_keepalive_connections=0))
"""Each request is on a connection of its own."""
GENERATE = {"input_ids": [1, 2, 3], "sampling_params": {}}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RouterProcess]]:
    routers = []

    def start_one(api_key: str | None = None, port: int | None = None, **changes: Any) -> RouterProcess:
        router = start_router(
            run_config(router_args(**changes)),
            host="127.0.0.1",
            port=port or free_port(),
            prometheus_port=free_port(),
            log_path=tmp_path / f"router{len(routers)}.log",
            api_key=api_key,
        )
        routers.append(router)
        return router

    yield start_one
    for router in routers:
        router.shutdown()


def children(router: RouterProcess) -> list[psutil.Process]:
    """The processes that serve: below the supervisor, and below its child if that has several."""
    (top,) = psutil.Process(router.process.pid).children()
    return [child for child in top.children() if "spawn_main" in " ".join(child.cmdline())]


@pytest.mark.parametrize("count", [1, 2])
def test_an_engine_serves_from_its_registration_to_its_removal(count: int, start, start_engine) -> None:
    router = start(slime_router_processes=count)
    engines = [start_engine(), start_engine()]
    for engine in engines:
        router.register_worker(engine.url)
    assert [worker["url"] for worker in router.list_workers()] == [engine.url for engine in engines]
    assert "slime_router_workers" in HTTP.get(str(router.metrics_url)).text
    for _ in range(12):  # so many that every process gets some
        assert HTTP.post(f"{router.url}/generate", json=GENERATE).json()["output_ids"] == [3, 2, 1]
    assert all(engine.seen("generate") for engine in engines)
    metrics = HTTP.get(f"{router.url}/metrics").text
    assert 'slime_router_requests_total{status="200"} 12' in metrics
    router.remove_worker(engines[0].url)
    before = len(engines[0].seen("generate"))
    for _ in range(12):
        assert HTTP.post(f"{router.url}/generate", json=GENERATE).status_code == 200
    assert len(engines[0].seen("generate")) == before
    router.remove_worker(engines[1].url)
    for _ in range(6):
        assert HTTP.post(f"{router.url}/generate", json=GENERATE).status_code == 503


def test_each_process_learns_of_new_weights(start, start_engine) -> None:
    router = start(slime_router_processes=2, router_policy="cache_aware")
    engines = [start_engine(), start_engine()]
    for engine in engines:
        engine.weight_version = "1"
        router.register_worker(engine.url)
    prompt = {"input_ids": list(range(64)), "sampling_params": {}}

    def known_of(count: int) -> int:
        """Bytes that were known, of so many more requests, each on a connection of its own."""
        before = metric("known_bytes")
        for _ in range(count):
            assert HTTP.post(f"{router.url}/generate", json=prompt).status_code == 200
        return metric("known_bytes") - before

    def metric(name: str) -> int:
        lines = HTTP.get(f"{router.url}/metrics").text.splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"slime_router_{name}_total "))

    known_of(40)
    assert known_of(10) == 10 * 256, "each process has sent it by now"
    for engine in engines:
        engine.weight_version = "2"
    deadline = time.monotonic() + 120
    while {worker["weight_version"] for worker in router.list_workers()} != {2}:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert metric("prompt_bytes") == 50 * 256  # asked of all processes after they were told
    assert known_of(10) < 10 * 256


def test_the_key_is_in_no_command_line_and_in_no_file(start, start_engine, tmp_path: Path) -> None:
    router = start(api_key="sekret")
    engine = start_engine(api_key="sekret")
    router.register_worker(engine.url)
    assert HTTP.post(f"{router.url}/generate", json=GENERATE).status_code == 401
    key = {"Authorization": "Bearer sekret"}
    assert HTTP.post(f"{router.url}/generate", json=GENERATE, headers=key).status_code == 200
    for process in psutil.Process(router.process.pid).children(recursive=True):
        assert "sekret" not in " ".join(process.cmdline())
    assert not any("sekret" in path.read_text() for path in tmp_path.iterdir())


def test_what_the_router_is_told_is_for_this_user_only(tmp_path: Path) -> None:
    path = tmp_path / "router.args.json"
    args = router_args(eval_datasets=[object()], nested={"a": [1, None, "b"]})
    command = slime_router_command(run_config(args), host="h", port=1, api_key="K", args_path=path)
    assert command[1:] == ["-m", "slime.router", str(path)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert '"nested": {"a": [1, null, "b"]}' in path.read_text() and "eval_datasets" not in path.read_text()


def test_the_middleware_has_the_args_of_the_run(start, checkpoint) -> None:
    router = start(slime_router_middleware_paths=[RADIX], hf_checkpoint=str(checkpoint))
    found = HTTP.post(f"{router.url}/retrieve_from_text", json={"text": "the lower"}).json()
    assert found["token_length"] == len(found["tokens"]) > 0


@pytest.mark.parametrize("count", [1, 2])
def test_a_port_that_is_taken_is_named(count: int, start, start_engine) -> None:
    with pytest.raises(RouterError, match=r"(?i)address already in use"):
        start(port=start_engine().port, slime_router_processes=count)


def test_the_end_of_one_process_is_the_end_of_the_router(start) -> None:
    router = start(slime_router_processes=2)
    os.kill(children(router)[0].pid, signal.SIGKILL)
    router.process.wait(300)
    assert "a process of the router has ended" in router.failure_reason()


def test_middleware_that_cannot_be_made_is_named(start, tmp_path: Path) -> None:
    with pytest.raises(RouterError, match="nowhere"):
        start(slime_router_middleware_paths=[RADIX], hf_checkpoint=str(tmp_path / "nowhere"))


async def test_the_parent_answers_once_all_its_children_serve(monkeypatch) -> None:
    serving, lines = [], []

    async def start_child(parent: Parent) -> Namespace:
        """In this process, and serving when the test says so."""
        ours, theirs = socket.socketpair()
        serves = asyncio.Event()

        async def take_over(table: Any) -> Any:
            await serves.wait()
            return {"counts": {}, "in_flight": {}}

        line = await Line.over(theirs, take_over)
        serving.append(serves)
        lines.append((line, asyncio.create_task(line.run())))
        parent._lines.append(await Line.over(ours, parent._answer))
        return SimpleNamespace(terminate=lambda: None)

    monkeypatch.setattr(Parent, "_start_child", start_child)
    monkeypatch.setattr(processes, "stop_signal", asyncio.Event)
    settings = RouterSettings.of(router_args(slime_router_processes=2))
    running = asyncio.create_task(Parent(settings).run())
    while len(lines) < 2:
        await asyncio.sleep(0)
    serving[0].set()
    question = {"method": "GET", "path": "/liveness", "query": {}, "body": ""}
    asked = asyncio.create_task(lines[0][0].ask(question))
    for _ in range(200):  # an answer takes some ten turns of this loop
        await asyncio.sleep(0)
    assert not asked.done()
    serving[1].set()
    assert (await asked)["status"] == 200
    await cancel_all([running, *(reading for _, reading in lines)])
