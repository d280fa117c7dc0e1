"""The experts that the engine says tokens were routed to are those that ``transformers`` chooses."""

import numpy as np
import pytest
import torch

from slime.arguments.groups.embedded_engine import EmbeddedServerArgs
from slime.backends.embedded_engine.admission import Limits
from slime.backends.embedded_engine.build import build_executor, build_server
from slime.backends.embedded_engine.checkpoint import load_checkpoint
from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.http.bodies import GenerateBody
from slime.backends.embedded_engine.http.prompts import make_generation
from slime.backends.embedded_engine.http.responses import ResponseBuilder
from slime.backends.embedded_engine.model_config import ModelConfig
from slime.utils.engine_meta import decode_int32_array
from tests.backends.embedded_engine.test_scheduler import run_all
from tests.engines.embedded import make_checkpoint
from tests.families import tiny_family

IDS = [(7 * i) % 256 for i in range(30)]
FAMILIES = (
    *("qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "minimax_m2", "deepseek_v3", "glm4_moe_lite"),
    *("glm_moe_dsa", "gpt_oss", "qwen3_next"),
)


def make_family(family, path):
    return make_checkpoint(path, family) if family == "qwen3_moe" else tiny_family(family, path)


@torch.no_grad()
def routes_of(model, ids):
    """[tokens, layers, top-k], each row in ascending order; zeros in dense layers."""
    found, layers = {}, model.config.num_hidden_layers
    hooks = [
        router.register_forward_hook(lambda _, __, out, i=i: found.__setitem__(i, out[2]))
        for i, layer in enumerate(model.model.layers)
        if (router := getattr(layer.mlp, "gate", getattr(layer.mlp, "router", None))) is not None
    ]
    model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    routes = torch.zeros(len(ids), layers, next(iter(found.values())).shape[-1], dtype=torch.int32)
    for i, chosen in found.items():
        routes[:, i] = chosen.sort(-1).values
    return routes.numpy()


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_routes_of_prefill_and_decoding_are_those_of_transformers(tmp_path, family):
    expected = routes_of(make_family(family, tmp_path), IDS)
    limits = Limits(rows=4, tokens=512, chunk=64, context=128)
    executor, weights = build_executor(tmp_path, ModelConfig.from_directory(tmp_path), limits, True)
    load_checkpoint(weights, tmp_path)
    lengths = [9, 20]
    executor.prefill([IDS[:length] for length in lengths], 0)
    assert executor.routes.shape[:2] == (2, 20)
    rows = [[executor.routes[row, :length]] for row, length in enumerate(lengths)]
    for step in range(10):
        at = [length + step for length in lengths]
        executor.decode(torch.tensor([IDS[i] for i in at]), torch.tensor(at), 0, at[-1] + 1)
        assert len(executor.routes) == 2
        for row, routes in zip(rows, executor.routes, strict=True):
            row.append(routes[None])
    for row, length in zip(rows, lengths, strict=True):
        assert np.array_equal(torch.cat(row).sort(-1).values, expected[: length + 10])
    assert len(np.unique(expected.reshape(len(IDS), -1), axis=0)) > 1


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    path = tmp_path_factory.mktemp("moe")
    model = make_checkpoint(path, "qwen3_moe")
    flags = dict(skip_tokenizer_init=True, chunked_prefill_size=16, max_running_requests=4)
    return model, build_server(
        EmbeddedServerArgs(model_path=str(path), enable_return_routed_experts=True, **flags)
    )


def requested(state, prompt, tokens=6, **body):
    sampling = {"max_new_tokens": tokens, "ignore_eos": True}
    fields = dict(input_ids=prompt, sampling_params=sampling, return_routed_experts=True)
    return make_generation(state, GenerateBody(**(fields | body))).sequences[0]


def told(sequence):
    """The routes in a response, [tokens - 1 - start, layers, top-k]."""
    meta = ResponseBuilder(sequence, None).build(None, "1")["meta_info"]
    rows = sequence.length - 1 - meta["routed_experts_start_len"]
    return np.sort(decode_int32_array(meta["routed_experts"]).reshape(rows, 2, 3), -1)


@torch.inference_mode()
def test_every_response_tells_of_all_its_tokens_but_the_last(served):
    """Short prompts and long ones in chunks, shared prompts, and sequences that are computed anew."""
    model, state = served
    scheduler = state.engine.scheduler
    prompts = [IDS[:5], IDS[:5], IDS * 2, IDS[:5], IDS[3:9], IDS[:5]]
    sequences = [requested(state, prompt, tokens=4 + i) for i, prompt in enumerate(prompts)]
    scheduler.waiting.extend(sequences)
    for _ in range(3):
        scheduler.step(admit=True)
    scheduler.retract()
    run_all(scheduler)
    assert any(s.cached_tokens for s in sequences) and any(s.num_retractions for s in sequences)
    for sequence in sequences:
        ids = sequence.prompt_ids + sequence.output_ids
        assert np.array_equal(told(sequence), routes_of(model, ids)[:-1])


@torch.inference_mode()
def test_a_response_may_tell_of_later_tokens_only_and_of_none_unless_asked(served):
    model, state = served
    later, silent = requested(state, IDS, routed_experts_start_len=28), requested(state, IDS)
    silent.routes_from = None
    unborn = requested(state, IDS)
    state.engine.scheduler.waiting.extend([later, silent])
    run_all(state.engine.scheduler)
    assert np.array_equal(told(later), routes_of(model, later.prompt_ids + later.output_ids)[28:-1])
    state.engine.scheduler.abort([unborn])
    for sequence in (silent, unborn):
        assert "routed_experts" not in ResponseBuilder(sequence, None).build(None, "1")["meta_info"]


def test_who_does_not_record_routes_says_so(served, tmp_path):
    _, state = served
    with pytest.raises(BadRequest, match="routed_experts_start_len -1: wanted 0 or more"):
        requested(state, IDS, routed_experts_start_len=-1)
    requested(state, IDS, routed_experts_start_len=len(IDS))
    with pytest.raises(BadRequest, match="routed_experts_start_len 31: wanted at most 30"):
        requested(state, IDS, routed_experts_start_len=len(IDS) + 1)
    make_checkpoint(tmp_path, "qwen3")
    flags = dict(model_path=str(tmp_path), skip_tokenizer_init=True)
    with pytest.raises(BadRequest, match=r"wanted: a server with --enable-return-routed-experts"):
        requested(build_server(EmbeddedServerArgs(**flags)), IDS)
    with pytest.raises(ValueError, match="--enable-return-routed-experts: qwen3 has no experts"):
        build_server(EmbeddedServerArgs(**flags, enable_return_routed_experts=True))
