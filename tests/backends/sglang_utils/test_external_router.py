"""A router of somebody else's, and one in front of two halves: real routers, fake engines."""

import pytest

from slime.backends.sglang_utils.external import start_external_rollout_servers
from slime.backends.sglang_utils.external_router import ExternalRouter
from slime.backends.sglang_utils.router import RouterError, RouterProcess, start_router
from slime.utils.http_utils import post
from tests.engines import free_port
from tests.engines.fake import FakeEngine
from tests.run_args import config_with, plugin_args

pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path):
    routers = []

    def start_one(**options) -> RouterProcess:
        router = start_router(
            config_with(**options),
            host="127.0.0.1",
            port=free_port(),
            prometheus_port=free_port(),
            log_path=tmp_path / "router.log",
        )
        routers.append(router)
        return router

    yield start_one
    for router in routers:
        router.shutdown()


@pytest.fixture
def engines():
    engines = [FakeEngine().start() for _ in range(2)]
    yield engines
    for engine in engines:
        engine.stop()


def joined(router: RouterProcess, known: list[str]) -> ExternalRouter:
    ours = ExternalRouter("127.0.0.1", int(router.url.rpartition(":")[2]))
    ours.join(known, timeout=600)
    return ours


def urls(router: RouterProcess) -> set[str]:
    return {worker["url"] for worker in router.list_workers()}


async def test_it_keeps_the_engines_that_it_had_and_loses_those_that_we_put_in(start, engines) -> None:
    router, (theirs, ours) = start(), engines
    router.register_worker(theirs.url)
    guest = joined(router, [theirs.url, ours.url])
    for engine in engines:
        guest.register_worker(engine.url)
    assert urls(router) == {theirs.url, ours.url}
    body = {"input_ids": [1, 2], "sampling_params": {}}
    assert (await post(f"{guest.url}/generate", body, max_retries=0))["output_ids"] == [2, 1]
    guest.shutdown()
    assert urls(router) == {theirs.url}
    assert router.is_alive()


def test_one_with_engines_of_others_is_refused(start, engines) -> None:
    router, (theirs, ours) = start(), engines
    router.register_worker(theirs.url)
    with pytest.raises(RouterError, match=f"has engines of others, {theirs.url}"):
        joined(router, [ours.url])
    assert urls(router) == {theirs.url}


def test_one_that_is_not_there_is_named() -> None:
    port = free_port()
    with pytest.raises(RouterError, match=f"router http://127.0.0.1:{port}: waited 0.2 s for it to start"):
        ExternalRouter("127.0.0.1", port).join([], timeout=0.2)


def test_one_that_no_longer_answers_is_gone_after_three_looks(start) -> None:
    router = start()
    guest = joined(router, [])
    assert guest.failure_reason() is None
    router.shutdown()
    assert [guest.failure_reason() for _ in range(2)] == [None, None]
    assert guest.failure_reason() == f"router {router.url}: it no longer answers"


async def test_a_request_goes_to_an_engine_that_prefills_and_to_one_that_decodes(start, engines) -> None:
    router, (prefill, decode) = start(router_pd_disaggregation=True), engines
    router.register_worker(prefill.url, "prefill", bootstrap_port=8998)
    router.register_worker(decode.url, "decode")
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}
    answer = await post(f"{router.url}/generate", body, max_retries=0)
    assert answer["output_ids"] == [3, 2, 1]
    first, second = prefill.seen("generate")[-1], decode.seen("generate")[-1]
    assert first["bootstrap_port"] == second["bootstrap_port"] == 8998
    assert first["bootstrap_room"] == second["bootstrap_room"]


def test_engines_of_others_are_put_behind_a_plug_in_s_router(start, engines, caplog) -> None:
    router, asked = start(), []
    engines[1].answers["server_info"] = {"encoder_only": True}
    args = plugin_args(rollout_external_engine_addrs=[engine.url for engine in engines])

    def start_router(args, has_pd_disaggregation):
        asked.append(has_pd_disaggregation)
        return "127.0.0.1", int(router.url.rpartition(":")[2])

    servers = start_external_rollout_servers(args, start_router=start_router)
    server = servers["default"]
    assert urls(router) == {engines[0].url} and list(servers) == ["default"] and asked == [False]
    assert (server.engine_urls, args.rollout_num_engines) == ([engine.url for engine in engines], 2)
    for step in (server.offload, server.onload, server.recover):
        step()
    assert f"engines at {engines[0].url}, {engines[1].url} are not this run's to recover" in caplog.text
    server.stop()
    assert urls(router) == set() and router.is_alive()
