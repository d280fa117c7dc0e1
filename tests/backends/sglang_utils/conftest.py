import os
import random
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from slime.backends.sglang_utils.server_engine import EnginePlacement, ServerEngine
from slime.backends.sglang_utils.servers import ENGINES
from slime.processes.child import ManagedProcess
from slime.utils.http_utils import bearer_header, find_available_port, http_url
from tests.backends.sglang_utils.engine_under_test import CONTEXT, EngineUnderTest
from tools.make_tiny_model import make_config, make_model, make_tokenizer, save_checkpoint

SCRIPT = Path(__file__).with_name("fake_engine.py")
CONFORMANCE_URL = "SLIME_CONFORMANCE_URL"
FRESH_STATE = {"seen": [], "running": 0, "weight_version": "default", "flush_refusals": 0}


def free_port() -> int:
    """A free port that another test session on this machine is unlikely to choose too."""
    return find_available_port(random.randrange(20000, 30000))


@dataclass
class FakeEngine:
    url: str
    process: ManagedProcess
    api_key: str | None = None

    def call(self, method: str, path: str, body: Any = None) -> Any:
        headers = bearer_header(self.api_key)
        response = httpx.request(method, self.url + path, json=body, headers=headers, trust_env=False)
        return response.raise_for_status().json()

    def set_state(self, **state: Any) -> None:
        self.call("POST", "/fake", state)

    def seen(self, what: str) -> list[Any]:
        return [body for kind, body in self.call("GET", "/seen") if kind == what]


@pytest.fixture(scope="session")
def start_fake_engine(tmp_path_factory) -> Iterator[Callable[..., FakeEngine]]:
    """Starts fake engines that live until the session ends."""
    processes = []

    def start(api_key: str | None = None) -> FakeEngine:
        port = free_port()
        argv = [sys.executable, str(SCRIPT), str(port), *([api_key] if api_key else [])]
        log = tmp_path_factory.mktemp("fake") / "engine.log"
        processes.append(ManagedProcess(argv, name="fake engine", log_path=log))
        retrying = Retrying(
            stop=stop_after_delay(30),
            wait=wait_fixed(0.05),
            retry=retry_if_exception_type(httpx.TransportError),
        )
        retrying(httpx.get, http_url("127.0.0.1", port) + "/health", trust_env=False)
        return FakeEngine(http_url("127.0.0.1", port), processes[-1], api_key)

    yield start
    for process in processes:
        process.terminate(0)


@pytest.fixture(scope="session")
def shared_fake_engine(start_fake_engine) -> FakeEngine:
    return start_fake_engine()


@pytest.fixture
def fake_engine(shared_fake_engine) -> FakeEngine:
    """A fake engine with nothing seen yet."""
    shared_fake_engine.set_state(**FRESH_STATE)
    return shared_fake_engine


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    """A Qwen3 with random fp32 weights and a byte-level tokenizer."""
    path = tmp_path_factory.mktemp("tiny")
    tokenizer = make_tokenizer()
    shape = {"hidden_size": 64, "num_layers": 2, "head_dim": 16, "intermediate_size": 96}
    config = make_config(tokenizer, "qwen3", **shape)
    config.max_position_embeddings = CONTEXT
    save_checkpoint(path, make_model(config), tokenizer)
    return path


def engine_args(checkpoint: Path) -> Namespace:
    """What launching an engine and a router reads from ``args``."""
    return Namespace(
        hf_checkpoint=str(checkpoint),
        seed=1234,
        num_gpus_per_node=1,
        rollout_num_gpus=1,
        rollout_num_gpus_per_engine=1,
        sglang_server_concurrency=64,
        offload_rollout=True,
        fp16=False,
        fp32=True,
        rollout_engine="embedded",
    )


def start_embedded(args: Namespace, log_dir: Path, api_key: str | None = None) -> ServerEngine:
    placement = EnginePlacement(rank=0, host="127.0.0.1", port=free_port(), gpu_offset=0, api_key=api_key)
    engine = ENGINES[args.rollout_engine](args, placement, log_dir)
    engine.launch()
    return engine


@pytest.fixture(scope="session")
def embedded_engine(tiny_checkpoint, tmp_path_factory) -> Iterator[ServerEngine]:
    engine = start_embedded(engine_args(tiny_checkpoint), tmp_path_factory.mktemp("engine"))
    try:
        engine.wait_ready(120)
        yield engine
    finally:
        engine.shutdown()


def conformance_targets() -> list[str]:
    return ["embedded", *(["sglang"] if os.environ.get(CONFORMANCE_URL) else [])]


@pytest.fixture(scope="session", params=conformance_targets())
def engine_under_test(request) -> Iterator[EngineUnderTest]:
    """The embedded engine always; the server at SLIME_CONFORMANCE_URL if that is set.

    That server has to serve a small fp32 checkpoint directory of this machine, with a context of
    16384 tokens and without an API key.
    """
    if request.param == "embedded":
        url = request.getfixturevalue("embedded_engine").endpoint.url
    else:
        url = os.environ[CONFORMANCE_URL]
    target = EngineUnderTest(url)
    yield target
    target.close()
