"""A fleet of engines that somebody else runs: real servers, started here, and a real router."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi.responses import Response

from slime.backends.sglang_utils.external import ExternalEngines
from slime.backends.sglang_utils.router import start_router
from slime.backends.sglang_utils.server_engine import EngineStartError
from slime.ray import engine_watch
from slime.ray.engine_group import EngineGroup
from slime.ray.fleet import Fleet
from slime.ray.served_model import ServedModel
from slime.utils.types import EngineEndpoint
from tests.engines import free_port
from tests.engines.embedded import Server, make_checkpoint
from tests.engines.fake import FakeEngine
from tests.ray.stand_ins import wait_until
from tests.run_args import config_with


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint(path)
    servers = [Server(path) for _ in range(2)]
    try:
        yield [server.wait_ready() for server in servers]
    finally:
        for server in servers:
            server.stop()


@pytest.fixture
def fleet(servers: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setattr(engine_watch, "LOOK_INTERVAL", 0.1)
    config = config_with(
        use_fault_tolerance=True,
        rollout_health_check_interval=60.0,
        rollout_health_check_timeout=5.0,
        rollout_health_check_first_wait=0.0,
        rollout_engine_hang_timeout=300.0,
    )
    source = ExternalEngines([endpoint(server) for server in servers])
    where = {"host": "127.0.0.1", "port": free_port(), "prometheus_port": free_port()}
    flags = config_with()
    router = lambda: start_router(flags, **where, log_path=tmp_path / "router.log")
    fleet = Fleet(config, [ServedModel("default", [EngineGroup(source)], router, waits_for_weights=True)])
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.stop()


def endpoint(server: Server) -> EngineEndpoint:
    return EngineEndpoint(server.url, None, 1, None)


def test_they_serve_until_they_no_longer_answer_and_are_not_ours_to_end(
    fleet: Fleet, servers: list[Server]
) -> None:
    router = fleet.models["default"].router
    assert router is not None

    def generate() -> list[int]:
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
        return httpx.post(f"{router.url}/generate", json=body, trust_env=False).json()["output_ids"]

    assert router.list_workers() == []
    fleet.admit("default")
    assert len(generate()) == 4
    assert fleet.endpoints_of() == [endpoint(server) for server in servers]

    servers[0].client.post("/pause_generation", json={})
    fleet.recover()
    assert len(fleet.endpoints_of()) == 2  # one that is paused answers

    servers[0].process.kill()
    wait_until(lambda: [worker["url"] for worker in router.list_workers()] == [servers[1].url])
    fleet.recover()
    assert fleet.endpoints_of() == [endpoint(servers[1])]
    assert fleet.launches_of() == 2
    assert len(generate()) == 4
    fleet.stop()
    assert servers[1].process.poll() is None


def test_any_answer_means_that_it_lives() -> None:
    engine = FakeEngine().start()
    handle = ExternalEngines([EngineEndpoint(engine.url, None, 1, None)]).launch(0, 0)
    hangs = lambda body: asyncio.sleep(60)
    engine.answers["health_generate"] = engine.answers["health"] = hangs
    assert handle.failure_reason() is None  # as of one that is paused
    engine.answers["model_info"] = Response(status_code=500)
    assert handle.failure_reason() is None
    engine.stop()
    assert "it no longer answers: ConnectError" in str(handle.failure_reason())


def test_one_that_does_not_answer_fails_the_start_by_its_address() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    source = ExternalEngines([EngineEndpoint(url, None, 1, None)])
    with pytest.raises(EngineStartError, match=rf"engine {url}: does not serve after 0\.3 s"):
        source.wait_ready([source.launch(0, 0)], 0.3)
