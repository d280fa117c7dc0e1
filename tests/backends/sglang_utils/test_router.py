import asyncio
import sys
from typing import Any

import httpx
import pytest
from sglang_router.launch_router import parse_router_args

from slime.arguments.core.parser import build_parser
from slime.backends.sglang_utils.router import RouterError, start_router
from slime.backends.sglang_utils.router_commands import metrics_address, router_command
from slime.processes.secret_options import hide_options
from slime.utils import http_utils
from slime.utils.http_utils import (
    HttpStatusError,
    get,
    http_url,
    init_http_client,
    post,
    share_key_with,
)
from tests.engines import free_port
from tests.run_args import config_with, run_args

pytestmark = pytest.mark.slow

CONCURRENCY = run_args(sglang_server_concurrency=8)


@pytest.fixture
def start(tmp_path):
    """Starts routers that end with the test."""
    routers = []

    def start_one(api_key=None, **flags):
        router = start_router(
            config_with(**flags),
            host="127.0.0.1",
            port=free_port(),
            prometheus_port=free_port(),
            log_path=tmp_path / f"router_{len(routers)}.log",
            api_key=api_key,
        )
        routers.append(router)
        return router

    yield start_one
    for router in routers:
        router.shutdown()
        assert not router.is_alive()


def parsed(**flags):
    command = router_command(config_with(**flags), host="127.0.0.1", port=1, prometheus_port=2)
    assert command[:3] == [sys.executable, "-m", "sglang_router.launch_router"]
    return parse_router_args(command[3:])


def given(*words: str) -> dict[str, Any]:
    """What the parser of a run makes of a command line, defaults included."""
    parser, _ = build_parser("embedded")
    for action in parser._actions:
        action.required = False
    return vars(parser.parse_args(words))


def test_the_router_stays_on_loopback_with_its_metrics():
    router_args = parsed(**given())
    assert (router_args.host, router_args.port) == ("127.0.0.1", 1)
    assert (router_args.prometheus_host, router_args.prometheus_port) == ("127.0.0.1", 2)


@pytest.mark.parametrize("place", [("10.0.0.1", 3), ("0.0.0.0", 29000)])
def test_the_router_shows_its_metrics_where_it_is_told(place):
    words = f"--router-prometheus-host {place[0]} --router-prometheus-port {place[1]}"
    router_args = parsed(**given(*words.split()))
    assert (router_args.prometheus_host, router_args.prometheus_port) == place
    asked = metrics_address(config_with(**given(*words.split())), "127.0.0.1", 2)
    assert asked == {"10.0.0.1": "http://10.0.0.1:3", "0.0.0.0": "http://127.0.0.1:29000"}[place[0]]


def test_two_runs_have_a_router_each_on_one_machine(start):
    routers = [start(**given()), start(**given())]
    assert all(router.is_alive() for router in routers)
    for router in routers:
        httpx.get(router.metrics_url, timeout=60).raise_for_status()


def test_router_flags_are_passed_on():
    router_args = parsed(
        router_policy="round_robin", router_balance_abs_threshold=10, sglang_router_request_timeout_secs=14400
    )
    assert router_args.policy == "round_robin"
    assert router_args.balance_abs_threshold == 10
    assert router_args.request_timeout_secs == 14400
    assert parsed(router_request_timeout_secs=77).request_timeout_secs == 77


def test_health_checks_and_breakers_are_off_until_one_of_their_options_is_set():
    untouched = parsed(router_health_check_interval_secs=60, router_cb_failure_threshold=10)
    assert untouched.disable_health_check and untouched.disable_circuit_breaker
    checked = parsed(router_health_check_interval_secs=2)
    assert not checked.disable_health_check and checked.disable_circuit_breaker
    assert checked.health_check_interval_secs == 2
    assert not parsed(router_cb_failure_threshold=3).disable_circuit_breaker


async def test_a_registered_engine_generates_until_it_is_removed(start, fake_engine):
    router = start()
    router.register_worker(fake_engine.url)
    assert [worker["url"] for worker in router.list_workers()] == [fake_engine.url]
    assert [worker["url"] for worker in (await get(f"{router.url}/workers"))["workers"]] == [fake_engine.url]
    payload = {"input_ids": [1, 2, 3], "sampling_params": {"temperature": 0.5, "sampling_seed": 9}}
    answer = await post(f"{router.url}/generate", payload, max_retries=0)
    assert answer == {"output_ids": [3, 2, 1], "meta_info": {"weight_version": "default", "extra": 1}}
    (received,) = fake_engine.seen("generate")
    assert received["sampling_params"] == payload["sampling_params"]
    router.remove_worker(fake_engine.url)
    assert router.list_workers() == []
    with pytest.raises(HttpStatusError, match="HTTP 503"):
        await post(f"{router.url}/generate", payload, max_retries=0)


async def test_requests_to_a_killed_engine_end_up_at_the_other(
    start, fake_engine, start_fake_engine, monkeypatch
):
    monkeypatch.setattr(http_utils, "RETRY_PAUSE_S", 0.05)
    dead = start_fake_engine()
    router = start(router_policy="round_robin")
    for engine in (fake_engine, dead):
        router.register_worker(engine.url)
    dead.stop()
    payload = {"input_ids": [1, 2], "sampling_params": {}}
    answers = await asyncio.gather(*(post(f"{router.url}/generate", payload) for _ in range(20)))
    assert all(answer["output_ids"] == [2, 1] for answer in answers)
    router.remove_worker(dead.url)
    assert [worker["url"] for worker in router.list_workers()] == [fake_engine.url]


def test_no_password_stands_in_the_command_line_of_a_server():
    words = [
        "--router-oracle-password=K",
        "--router-postgres-db-url=postgres://user:K@db/slime",
        "--router-redis-url=redis://:K@db",
        "--router-control-plane-api-keys=id:name:admin:K",
    ]
    command = router_command(
        config_with(**given(*words)), host="127.0.0.1", port=1, prometheus_port=2, api_key="K"
    )
    argv, environment = hide_options([*command, "--ssl-keyfile-password=K"])  # of SGLang
    assert not any("K" in word for word in argv)
    (hidden,) = environment.values()
    assert hidden.count("K") == 6


async def test_the_key_is_asked_of_clients_and_shown_to_engines(start, start_fake_engine):
    engine = start_fake_engine(api_key="sekret")
    router = start(api_key="sekret")
    router.register_worker(engine.url)
    payload = {"input_ids": [1, 2], "sampling_params": {}}
    init_http_client(CONCURRENCY, api_key="sekret")
    share_key_with(router.url)
    try:
        assert (await post(f"{router.url}/generate", payload, 0))["output_ids"] == [2, 1]
        for wrong in ("guess", None):
            init_http_client(CONCURRENCY, api_key=wrong)
            share_key_with(router.url)
            with pytest.raises(HttpStatusError, match="HTTP 401"):
                await post(f"{router.url}/generate", payload, 0)
    finally:
        init_http_client(CONCURRENCY)


def test_an_engine_that_does_not_serve_is_not_registered(start):
    url = http_url("127.0.0.1", free_port())
    with pytest.raises(RouterError, match=rf"waited 0\.5 s for it to list {url} as healthy"):
        start().register_worker(url, timeout=0.5)


def test_a_killed_router_is_noticed_and_explained(start):
    router = start()
    assert router.is_alive() and router.failure_reason() is None
    router.process.terminate(0)
    assert not router.is_alive()
    assert "killed by SIGKILL" in router.failure_reason()
    with pytest.raises(RouterError, match=r"GET /workers: router .*killed by SIGKILL"):
        router.list_workers()


def test_a_router_that_cannot_start_says_why(tmp_path, fake_engine):
    taken = fake_engine.port
    with pytest.raises(RouterError, match=r"exit status|killed") as caught:
        start_router(
            config_with(),
            host="127.0.0.1",
            port=taken,
            prometheus_port=free_port(),
            log_path=tmp_path / "router.log",
        )
    assert "address" in str(caught.value).lower()


def test_the_start_of_the_router_has_the_limit_of_the_startup_flag(tmp_path):
    with pytest.raises(RouterError, match=r"waited 0\.01 s .*\(--engine-startup-timeout\)"):
        start_router(
            config_with(engine_startup_timeout=0.01),
            host="127.0.0.1",
            port=free_port(),
            prometheus_port=free_port(),
            log_path=tmp_path / "router.log",
        )
