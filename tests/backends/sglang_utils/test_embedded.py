"""The embedded engine, started and stopped as its engine actor does it, behind the router."""

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from slime.backends.sglang_utils.client import EngineClient, EngineError
from slime.backends.sglang_utils.router import start_router
from slime.backends.sglang_utils.server_engine import EngineStartError
from slime.utils.http_utils import HttpStatusError, init_http_client, post, share_key_with
from tests.backends.sglang_utils.conftest import engine_config, start_embedded
from tests.engines import free_port

pytestmark = pytest.mark.slow

KEY = "a key of this run"


@pytest.fixture(scope="module")
def engine(tiny_checkpoint, tmp_path_factory):
    """An engine that asks for a key."""
    engine = start_embedded(engine_config(tiny_checkpoint), tmp_path_factory.mktemp("keyed"), api_key=KEY)
    engine.wait_ready(600)
    yield engine
    engine.shutdown()


def command_lines() -> list[str]:
    """Returns the command lines of all processes of this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_text(errors="replace").replace("\0", " "))
    return found


def test_the_key_stands_in_no_command_line(engine, tmp_path):
    router = start_router(
        engine.config,
        host="127.0.0.1",
        port=(port := free_port()),
        prometheus_port=free_port(),
        log_path=tmp_path / "router.log",
        api_key=KEY,
    )
    try:
        lines = command_lines()
    finally:
        router.shutdown()
    for server in (str(port), str(engine.placement.port)):
        assert any(f"--port={server}" in line for line in lines)
    assert not any(KEY in line for line in lines)


async def test_generation_through_the_router_with_a_key(engine, tmp_path):
    router = start_router(
        engine.config,
        host="127.0.0.1",
        port=free_port(),
        prometheus_port=free_port(),
        log_path=tmp_path / "router.log",
        api_key=KEY,
    )
    try:
        router.register_worker(engine.endpoint.url)
        init_http_client(engine.config.flat, api_key=KEY)
        share_key_with(router.url)
        sampling = {"max_new_tokens": 5, "temperature": 1.0, "ignore_eos": True}
        payload = {"input_ids": [40, 41, 42], "sampling_params": sampling, "return_logprob": True}
        answer = await post(f"{router.url}/generate", payload, max_retries=0)
        assert [triple[1] for triple in answer["meta_info"]["output_token_logprobs"]] == answer["output_ids"]
        assert answer["meta_info"]["weight_version"] == "default"
        with pytest.raises(HttpStatusError, match="HTTP 401"):
            await post(f"{engine.endpoint.url}/generate", payload, 0, headers={"Authorization": "Bearer x"})
    finally:
        init_http_client(engine.config.flat)
        router.shutdown()


def test_the_control_plane_asks_for_the_key(engine):
    engine.client.continue_generation()
    stranger = EngineClient(type(engine.endpoint)(engine.endpoint.url, "guess", 1, None))
    assert stranger.health()
    with pytest.raises(EngineError, match=r"/continue_generation: HTTP 401"):
        stranger.continue_generation()


def test_a_killed_engine_is_noticed_and_leaves_nothing(tiny_checkpoint, tmp_path):
    engine = start_embedded(engine_config(tiny_checkpoint), tmp_path)
    engine.wait_ready(600)
    (server,) = psutil.Process(engine.process.pid).children()
    os.kill(server.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while engine.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert "killed by SIGKILL" in engine.failure_reason()
    assert not psutil.pid_exists(engine.process.pid) or not psutil.Process(engine.process.pid).children()


def test_a_missing_checkpoint_fails_the_start_with_its_name(tmp_path):
    engine = start_embedded(engine_config(tmp_path / "no_such_model"), tmp_path)
    with pytest.raises(EngineStartError, match=r"(?s)engine 0 .*exit status.*no_such_model"):
        engine.wait_ready(600)
    engine.shutdown()
