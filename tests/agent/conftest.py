"""An engine that agents' adapters talk to."""

import pytest

from slime.agent.aiohttp_threaded import run_app_in_thread
from tests.engines.fake import TalkingEngine
from tools.make_tiny_model import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def serve_to(engine, tokenizer):
    """Serves an adapter of this kind with a session ``s`` that is open; returns it and its address."""
    servers = []

    def serve(kind, **options):
        parsers = {"tool_parser": "hermes", "reasoning_parser": "qwen3"}
        options = {"tokenizer": tokenizer, **parsers, **options}
        adapter = kind(sglang_url=f"{engine.url}/generate", **options)
        servers.append(run_app_in_thread(adapter.app, runner_kwargs={"handler_cancellation": True}))
        adapter.open_session("s", sampling_defaults={"max_new_tokens": 200, "temperature": 1.0})
        return adapter, servers[-1].url

    yield serve
    for server in servers:
        server.stop(timeout=300)


@pytest.fixture
def engine(tokenizer):
    engine = TalkingEngine(tokenizer).start()
    yield engine
    engine.stop()
