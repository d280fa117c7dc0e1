"""Routes pass from a real engine through the router into samples, over several turns."""

from argparse import Namespace
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from slime.backends.sglang_utils.router import start_router
from slime.config.run import run_config
from slime.rollout import generation, sglang_streaming_rollout
from slime.utils.http_utils import post
from slime.utils.types import Sample
from tests.backends.embedded_engine.test_routes import IDS, routes_of
from tests.engines import free_port
from tests.engines.embedded import Server, make_checkpoint
from tests.router.conftest import router_args
from tests.run_args import run_args, with_groups

PARAMS = {"temperature": 1.0, "sampling_seed": 5, "ignore_eos": True, "skip_special_tokens": False}


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[tuple]:
    path = tmp_path_factory.mktemp("moe")
    model, settings = make_checkpoint(path, "qwen3_moe"), router_args(hf_checkpoint=str(path))
    server, router = Server(path, "--enable-return-routed-experts"), None
    try:
        where = {"host": "127.0.0.1", "port": settings.sglang_router_port, "prometheus_port": free_port()}
        router = start_router(run_config(settings), **where, log_path=path / "router.log")
        router.register_worker(server.wait_ready().url)
        more = dict(use_rollout_routing_replay=True, num_layers=2, moe_router_topk=3)
        yield model, with_groups({**vars(settings), **more})
    finally:
        if router is not None:
            router.shutdown()
        server.stop()


@pytest.fixture
def args(served, monkeypatch) -> Namespace:
    tokenizer = SimpleNamespace(decode=lambda *_, **__: "")
    for module in (generation, sglang_streaming_rollout):
        state = SimpleNamespace(tokenizer=tokenizer, aborted=False)
        monkeypatch.setattr(module, "GenerateState", lambda args, state=state: state)
    return served[1]


async def test_a_sample_has_the_routes_of_all_its_turns(served, args) -> None:
    """One that was cut short, went on, and was told something by a tool."""
    sample = Sample(index=0, tokens=list(IDS))
    await generation.generate(args, sample, PARAMS | {"max_new_tokens": 5})
    assert sample.rollout_routed_experts.shape == (len(IDS) + 4, 2, 3)
    sample.status = Sample.Status.ABORTED
    await generation.generate(args, sample, PARAMS | {"max_new_tokens": 12})
    sample.append_response_tokens(args, tokens=[7, 8, 9], trainable=False)
    sample.status = Sample.Status.ABORTED
    await generation.generate(args, sample, PARAMS | {"max_new_tokens": 20})
    assert sample.response_length == 20
    expected = routes_of(served[0], sample.tokens)[:-1]
    assert np.array_equal(np.sort(sample.rollout_routed_experts, -1), expected)


async def test_an_answer_may_bring_the_rows_of_new_tokens_only(served, args) -> None:
    sample = Sample(index=0, tokens=list(IDS))
    await generation.generate(args, sample, PARAMS | {"max_new_tokens": 5})
    request = {"input_ids": sample.tokens, "sampling_params": PARAMS | {"max_new_tokens": 5}}
    request |= generation.wanted_of_tokens(args) | {"routed_experts_start_len": len(IDS) + 4}
    generation.take_answer(args, sample, await post(generation.get_model_url(args), request), PARAMS)
    expected = routes_of(served[0], sample.tokens)[:-1]
    assert np.array_equal(np.sort(sample.rollout_routed_experts, -1), expected)


async def test_a_stream_brings_the_routes_with_its_end(served, args) -> None:
    sample = Sample(index=0, tokens=list(IDS))
    await sglang_streaming_rollout.generate_streaming(args, sample, PARAMS | {"max_new_tokens": 9})
    expected = routes_of(served[0], sample.tokens)[:-1]
    assert np.array_equal(np.sort(sample.rollout_routed_experts, -1), expected)


async def test_evaluations_and_other_runs_ask_for_no_routes(args) -> None:
    sample = Sample(index=0, tokens=list(IDS))
    await generation.generate(args, sample, PARAMS | {"max_new_tokens": 3}, evaluation=True)
    assert sample.rollout_routed_experts is None
    assert "return_routed_experts" not in generation.wanted_of_tokens(run_args())
