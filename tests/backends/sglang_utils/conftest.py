import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slime.backends.sglang_utils.server_engine import EnginePlacement, ServerEngine
from slime.backends.sglang_utils.servers import ENGINES
from slime.config.run import RunConfig
from tests.engines import free_port
from tests.engines.embedded import Server, make_checkpoint
from tests.engines.fake import FakeEngine
from tests.engines.under_test import EngineUnderTest
from tests.run_args import config_with

CONFORMANCE_URL = "SLIME_CONFORMANCE_URL"


@pytest.fixture
def start_fake_engine() -> Iterator[Callable[..., FakeEngine]]:
    """Starts fake engines that live until the test ends."""
    engines = []

    def start(api_key: str | None = None) -> FakeEngine:
        engines.append(FakeEngine(api_key).start())
        return engines[-1]

    yield start
    for engine in engines:
        engine.stop()


@pytest.fixture
def fake_engine(start_fake_engine) -> FakeEngine:
    return start_fake_engine()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_checkpoint(path)
    return path


def engine_config(checkpoint: Path) -> RunConfig:
    """Configures an engine and its router."""
    return config_with(
        hf_checkpoint=str(checkpoint), num_gpus_per_node=1, offload_rollout=True, fp32=True, bf16=False
    )


def start_embedded(config: RunConfig, log_dir: Path, api_key: str | None = None) -> ServerEngine:
    """Starts an embedded engine as an engine actor does."""
    placement = EnginePlacement(rank=0, host="127.0.0.1", port=free_port(), gpu_offset=0, api_key=api_key)
    engine = ENGINES["embedded"](config, placement, log_dir)
    engine.launch()
    return engine


@pytest.fixture(scope="session")
def embedded_engine(tiny_checkpoint) -> Iterator[Server]:
    server = Server(tiny_checkpoint, "--enable-memory-saver")
    try:
        yield server.wait_ready()
    finally:
        server.stop()


def conformance_targets() -> list[str]:
    return ["embedded", *(["sglang"] if os.environ.get(CONFORMANCE_URL) else [])]


@pytest.fixture(scope="session", params=conformance_targets())
def engine_under_test(request) -> Iterator[EngineUnderTest]:
    """The embedded engine always; the server at SLIME_CONFORMANCE_URL if that is set.

    That server has to serve a small fp32 checkpoint directory of this machine, with a context of
    16384 tokens and without an API key.
    """
    if request.param == "embedded":
        url = request.getfixturevalue("embedded_engine").url
    else:
        url = os.environ[CONFORMANCE_URL]
    target = EngineUnderTest(url, request.param == "embedded")
    yield target
    target.close()
