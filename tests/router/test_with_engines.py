"""The router in front of real engines."""

import random
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.backends.sglang_utils.router import RouterProcess, start_router
from slime.config.run import run_config
from slime.rollout import generation, text_generation
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample
from tests.engines import free_port
from tests.engines.embedded import ENDLESS, Server, make_checkpoint
from tests.router.conftest import router_args, served
from tests.router.test_middleware import RADIX
from tests.run_args import with_groups

pytestmark = pytest.mark.slow


@pytest.fixture
def args(tmp_path) -> Iterator[Namespace]:
    """Makes the arguments of a rollout through the middleware of a router, before an embedded engine."""
    make_checkpoint(tmp_path / "model")
    checkpoint = str(tmp_path / "model")
    args = router_args(slime_router_middleware_paths=[RADIX], hf_checkpoint=checkpoint)
    server, router = Server(checkpoint), None
    try:
        server.wait_ready()
        router = _router(args, tmp_path)
        router.register_worker(server.url)
        routers = {"default": (args.sglang_router_ip, args.sglang_router_port)}
        more = dict(sglang_model_routers=routers, router_policy="consistent_hashing")
        yield with_groups({**vars(args), **more})
    finally:
        if router is not None:
            router.shutdown()
        server.stop()


def _router(args: Namespace, folder) -> RouterProcess:
    where = {"host": args.sglang_router_ip, "port": args.sglang_router_port, "prometheus_port": free_port()}
    return start_router(run_config(args), **where, log_path=folder / "router.log")


@pytest.fixture
def two_engines(tmp_path: Path) -> Iterator[list[Server]]:
    make_checkpoint(tmp_path / "model")
    servers = [Server(tmp_path / "model") for _ in range(2)]
    try:
        yield [server.wait_ready() for server in servers]
    finally:
        for server in servers:
            server.stop()


async def _cached(servers: list[Server], seed: int, policy: str | None) -> int:
    """Tokens that engines had of a prompt asked for three times, while one of them still works on it.

    So long the embedded engine has it.
    """
    rng = random.Random(seed)
    prompt = {"input_ids": [rng.randrange(256) for _ in range(96)]}
    endless = {"max_new_tokens": ENDLESS, "ignore_eos": True}
    cached = 0
    async with served(router_policy=policy) as router:
        await router.add(*servers)
        working = {**prompt, "sampling_params": endless, "stream": True}
        async with router.client.post("/generate", json=working) as first:
            assert await first.content.readany()
            for _ in range(3):
                status, answer = await router.post(
                    "/generate", **prompt, sampling_params={"max_new_tokens": 1}
                )
                assert status == 200, answer
                cached += answer["meta_info"]["cached_tokens"]
    return cached


async def test_engines_have_prompts_that_the_router_knows_them_to_have(two_engines: list[Server]) -> None:
    assert await _cached(two_engines, 1, None) == 0, "the other one has fewer requests"
    assert await _cached(two_engines, 2, "cache_aware") == 3 * 96


async def test_text_gives_the_sample_that_tokens_give(args: Namespace, monkeypatch) -> None:
    tokenizer = load_tokenizer(args.hf_checkpoint, False)
    encode = lambda sample: tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    state = SimpleNamespace(tokenizer=tokenizer, encode_prompt=encode)
    monkeypatch.setattr(generation, "GenerateState", lambda args: state)
    for index in range(4):
        params = {"temperature": 1.0, "max_new_tokens": 20, "sampling_seed": index, "no_stop_trim": True}
        params["skip_special_tokens"] = False
        by_tokens, by_text = (Sample(index=index, prompt="What is 3 * 4?", session_id="s") for _ in range(2))
        by_tokens = await generation.generate(args, by_tokens, params)
        by_text = await text_generation.generate(args, by_text, params)
        assert by_text.tokens == by_tokens.tokens
        assert by_text.rollout_log_probs == by_tokens.rollout_log_probs
        assert by_text.loss_mask == by_tokens.loss_mask and by_text.status == by_tokens.status
        assert by_text.response == by_tokens.response
