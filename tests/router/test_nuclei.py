"""Samples that were drawn from nuclei, through slime's router, against a model of transformers."""

from argparse import Namespace
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from slime.backends.sglang_utils.router import start_router
from slime.config.run import run_config
from slime.rollout import generation, sglang_streaming_rollout
from slime.rollout.generate_state import training_sampling_params
from slime.utils.types import Sample
from tests.engines import free_port
from tests.engines.embedded import Server, make_checkpoint
from tests.router.conftest import router_args
from tests.run_args import with_groups

TOP_P = 0.8
PROMPT = [40, 41, 42, 43, 44]
TOOL = [7, 8, 9]


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[tuple[torch.nn.Module, Namespace]]:
    path = tmp_path_factory.mktemp("dense")
    model, settings = make_checkpoint(path), router_args(hf_checkpoint=str(path))
    server, router = Server(path), None
    try:
        where = {"host": "127.0.0.1", "port": settings.sglang_router_port, "prometheus_port": free_port()}
        router = start_router(run_config(settings), **where, log_path=path / "router.log")
        router.register_worker(server.wait_ready().url)
        more = dict(replays_nucleus=True, use_rollout_routing_replay=False, router_policy=None)
        flags = dict(rollout_temperature=1.0, rollout_top_p=TOP_P, nucleus_top_k=300, rollout_stop=None)
        ends = dict(
            rollout_max_response_len=8, rollout_stop_token_ids=None, rollout_skip_special_tokens=False
        )
        yield model, with_groups({**vars(settings), **more, **flags, **ends})
    finally:
        if router is not None:
            router.shutdown()
        server.stop()


@pytest.fixture
def args(served, monkeypatch) -> Namespace:
    state = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda *_, **__: ""), aborted=False)
    for module in (generation, sglang_streaming_rollout):
        monkeypatch.setattr(module, "GenerateState", lambda args: state)
    return served[1]


def params(args: Namespace, length: int) -> dict[str, object]:
    return {**training_sampling_params(run_config(args)), "max_new_tokens": length, "ignore_eos": True}


def expect_nuclei(model: torch.nn.Module, sample: Sample) -> None:
    """Each token of the model's with the nucleus that transformers gives it, and the log-prob within it."""
    with torch.no_grad():
        p = model(torch.tensor([sample.tokens])).logits[0].double().softmax(-1)
    offsets = sample.rollout_top_p_token_offsets or []
    for i, (begin, end) in enumerate(pairwise(offsets)):
        found = (sample.rollout_top_p_token_ids or [])[begin:end]
        position = len(PROMPT) + i
        row, order = p[position - 1], p[position - 1].argsort(descending=True)
        wanted = order[(row[order].cumsum(0) - row[order]) <= TOP_P].tolist()
        trained = (sample.loss_mask or [])[i]
        assert sorted(found) == (sorted(wanted) if trained else [])
        log_prob = float((row[sample.tokens[position]] / row[wanted].sum()).log()) if trained else 0.0
        assert sample.rollout_log_probs[i] == pytest.approx(log_prob, abs=1e-5)
    assert len(offsets) == sample.response_length + 1


def in_the_manner(args: Namespace, name: str, monkeypatch, length: int) -> dict[str, object]:
    """Sampling parameters by which an engine is asked in one manner alone."""
    found = params(args, length)
    if name == "sglang":
        del found["custom_params"]
    else:
        monkeypatch.setattr(generation, "wanted_of_tokens", lambda *_: {"return_logprob": True})
    return found


@pytest.mark.parametrize("manner", ["sglang", "original"])
@pytest.mark.parametrize(
    "generate", [generation.generate, sglang_streaming_rollout.generate_streaming], ids=["whole", "stream"]
)
async def test_a_sample_has_the_nuclei_of_all_its_parts(served, args, monkeypatch, generate, manner) -> None:
    """One that was cut short, went on, and was told something by a tool."""
    sample = Sample(index=0, tokens=list(PROMPT))
    for length in (5, 12, 20):
        sample.status = Sample.Status.ABORTED
        await generate(args, sample, in_the_manner(args, manner, monkeypatch, length))
        if length == 12:
            sample.append_response_tokens(args, tokens=TOOL, trainable=False)
    assert sample.response_length == 20 and sample.loss_mask == [1] * 12 + [0] * 3 + [1] * 5
    expect_nuclei(served[0], sample)
    again = Sample.from_dict(sample.to_dict())
    assert again.rollout_top_p_token_offsets == sample.rollout_top_p_token_offsets


async def test_an_answer_without_nuclei_after_one_with_them_is_refused(args, monkeypatch) -> None:
    sample = Sample(index=3, tokens=list(PROMPT))
    await generation.generate(args, sample, params(args, 4))
    sample.status = Sample.Status.ABORTED
    monkeypatch.setattr(generation, "wanted_of_tokens", lambda *_: {"return_logprob": True})
    with pytest.raises(ValueError, match="sample 3: 5 top-p offsets for 8 tokens"):
        await generation.generate(args, sample, {**params(args, 8), "custom_params": None})


async def test_evaluations_and_other_runs_ask_for_no_nuclei(args) -> None:
    sample = Sample(index=0, tokens=list(PROMPT))
    await generation.generate(args, sample, {"max_new_tokens": 3, "top_p": TOP_P}, evaluation=True)
    assert sample.rollout_top_p_token_ids is None
    other = with_groups({**vars(args), "replays_nucleus": False, "nucleus_top_k": -1})
    assert generation.wanted_of_tokens(other) == {"return_logprob": True}
    assert "custom_params" not in training_sampling_params(run_config(other))
