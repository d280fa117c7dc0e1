"""Rollout functions against an embedded engine whose weights are updated while it answers."""

import asyncio
import time
from collections import Counter

import pytest

from slime.agent.adapters import OpenAIAdapter
from slime.agent.adapters.session import TurnRequest
from slime.backends.sglang_utils.client import EngineClient
from slime.rollout.answer_log import answer_log_for
from slime.rollout.attempts import flatten
from slime.rollout.fully_async_rollout import generate_rollout_fully_async, stop_worker
from slime.rollout.generate_state import GenerateState
from slime.rollout.sglang_rollout import generate, generate_rollout_async
from slime.rollout.sglang_streaming_rollout import generate_streaming
from slime.rollout.token_log import read_answers
from slime.utils.async_utils import get_async_loop, run
from slime.utils.types import EngineEndpoint, Sample
from slime.utils.weight_clock import clock
from tests.engines.embedded import LONG, SHAPE, Server, make_checkpoint
from tests.run_args import run_config
from tools.make_tiny_model import make_tokenizer

pytestmark = pytest.mark.slow

STREAMING = "slime.rollout.sglang_streaming_rollout.generate_streaming"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path)
    server = Server(path)
    try:
        yield server.wait_ready()
    finally:
        server.stop()


@pytest.fixture
def client(server):
    clock.__init__()
    client = EngineClient(EngineEndpoint(server.url, None, 1, None))
    client.update_weight_version("1")
    clock.end_update(1)
    yield client
    stop_worker()
    client.close()


@pytest.fixture
def real_args(make_args, server):
    own = {"n_samples_per_prompt": 2, "vocab_size": SHAPE["vocab_size"]}
    own["sglang_router_port"] = int(server.url.rpartition(":")[2])
    return lambda **overrides: make_args(**{**own, **overrides})


def update(client, version, mode="abort"):
    """Updates the weights as ``WeightUpdate`` and the rollout manager do."""
    clock.begin_update()
    client.pause_generation(mode)
    client.flush_idle_cache()
    client.begin_weight_update()
    client.end_weight_update()
    client.update_weight_version(str(version))
    client.continue_generation()
    clock.end_update(version)


def test_streaming_gives_the_sample_of_the_default_function(client, real_args):
    args = real_args()

    def ask(function):
        sample = Sample(prompt="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", index=0)
        params = GenerateState(args).sampling_params | {"sampling_seed": 3, "max_new_tokens": 24}
        done = run(function(args, sample, params))
        done.request_times = {}
        return done

    streamed = ask(generate_streaming)
    assert streamed.response_length > 0 and streamed.version_spans == [("1", streamed.response_length)]
    assert streamed == ask(generate)


@pytest.mark.parametrize("function", [generate, generate_streaming])
def test_a_stop_string_is_found_wherever_an_abort_has_parted_it(client, real_args, function):
    """The engine sees only what it makes, and would go on to the end."""
    args = real_args()

    tokenizer = GenerateState(args).tokenizer

    def ask(tokens, stop):
        sample = Sample(prompt="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", index=0)
        params = GenerateState(args).sampling_params | {"sampling_seed": 3, "ignore_eos": True, "stop": stop}
        params["max_new_tokens"] = tokens
        run(function(args, sample, params))
        return sample, params

    def parts(sample):
        return sample.tokens, sample.response, sample.version_spans, sample.loss_mask

    ids = ask(300, None)[0].tokens[-300:]
    pieces = [tokenizer.decode([token]) for token in ids]
    plain = [piece.isascii() and len(piece) == 1 for piece in pieces]
    at = next(i for i in range(8, 298) if all(plain[i : i + 3]))
    stop = "".join(pieces[at : at + 3])
    whole, params = ask(300, [stop])
    assert whole.response.endswith(stop) and whole.response_length == at + 3
    for cut in [*range(1, at, 5), *range(at, at + 3)]:
        sample, _ = ask(cut, [stop])
        assert sample.status is Sample.Status.TRUNCATED and sample.response_length == cut
        sample.status = Sample.Status.ABORTED
        run(function(args, sample, params))
        assert sample.status is Sample.Status.COMPLETED, cut
        assert parts(sample) == parts(whole), cut
        assert sample.rollout_log_probs == pytest.approx(whole.rollout_log_probs, abs=1e-4)


@pytest.mark.parametrize(
    ("path", "modes"),
    [(None, ["abort"]), (STREAMING, ["abort"]), (None, ["retract", "in_place"])],
    ids=["asked again", "streamed", "within a request"],
)
def test_answers_under_way_go_on_with_the_new_weights(client, real_args, make_source, path, modes):
    args = real_args(
        custom_generate_function_path=path, rollout_max_response_len=400, sglang_server_concurrency=8
    )
    GenerateState(args).sampling_params |= {"ignore_eos": True}
    source = make_source(args)
    samples, metrics, mixed, version = [], Counter(), [], 1
    # An update may find nothing under way, as engine and test are not always equally fast.
    while version < 5 or (not mixed and version < 50):
        output = generate_rollout_fully_async(args, version - 1, source)
        samples += [sample for group in output.samples for sample in group]
        metrics.update(output.metrics)
        mixed = [sample for sample in samples if len(sample.version_spans) > 1]
        time.sleep(0.1)  # so that others are under way
        version += 1
        update(client, version, modes[version % len(modes)])
    assert len({sample.index for sample in samples}) == len(samples) == 6 * (version - 1)
    assert all(sample.response_length == 400 == len(sample.rollout_log_probs) for sample in samples)
    assert mixed
    for sample in mixed:
        versions = [int(version) for version, _ in sample.version_spans]
        assert versions == sorted(versions)
    begun_again = sum(len(sample.weight_versions) - 1 for sample in samples)
    assert (begun_again > 0) == (modes == ["abort"]) == (metrics["rollout/fully_async/resumed"] > 0)
    for sample in samples:
        again = sample.prefix_cache_info.recomputed_tokens
        assert again == sum(recomputed(sample, modes))
    stop_worker()
    assert source.ledger.balanced and source.ledger.leased == 0


def recomputed(sample, modes):
    """The tokens that were computed before each update that had some computed again, by mode."""
    made = 0
    for number, (version, count) in enumerate(sample.version_spans):
        if number and modes[int(version) % len(modes)] != "in_place":
            yield len(sample.tokens) - sample.response_length + made - 1
        made += count


TURN = {"temperature": 0, "max_new_tokens": LONG // 2, "ignore_eos": True}


@pytest.fixture(scope="module")
def agent(server):
    """``agent(sid)``: the turn of a session, under way, and what it becomes."""
    adapter = OpenAIAdapter(tokenizer=make_tokenizer(), sglang_url=f"{server.url}/generate")

    def begin(sid):
        adapter.open_session(sid, sampling_defaults=TURN)
        asked = TurnRequest(sid, [{"role": "user", "content": "hi"}], None, {})
        turn = asyncio.run_coroutine_threadsafe(adapter.turn(asked), get_async_loop())

        def end():
            assert turn.result(300).finish_reason == "length"
            (sample,) = run(adapter.finish_session(sid, base_sample=Sample()))
            return sample

        return turn, end

    return begin


@pytest.fixture(scope="module")
def undisturbed(agent):
    return agent("undisturbed")[1]()


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_turn_that_an_update_meets_is_the_turn_without_one(client, agent, undisturbed, mode):
    """Token by token and log-prob by log-prob, as the weights of the update are the same."""
    turn, end = agent(mode)
    while client.loads()["loads"][0]["num_used_tokens"] < 100:
        assert not turn.done()
        time.sleep(0.002)
    update(client, 2, mode)
    sample = end()
    assert sample.tokens == undisturbed.tokens and sample.status is undisturbed.status
    assert sample.rollout_log_probs == pytest.approx(undisturbed.rollout_log_probs, abs=1e-5)
    (first, before), (second, after) = sample.version_spans
    assert (first, second, before + after) == ("1", "2", TURN["max_new_tokens"])
    again = sum(recomputed(sample, [mode]))
    assert sample.prefix_cache_info.recomputed_tokens == again and (again == 0) == (mode == "in_place")


@pytest.fixture
def no_log_after(real_args):
    yield
    answer_log_for(run_config(real_args()), 0)


def test_answers_go_on_from_the_log_with_the_tokens_that_they_would_have_had(
    client, real_args, make_source, tmp_path, no_log_after
):
    """A manager was lost after some lines; the engine has nothing cached of them."""
    directory = tmp_path / "log"
    flags = {"use_fault_tolerance": True, "token_log_dir": str(directory), "token_log_interval": 16}
    args, context = real_args(rollout_max_response_len=300, **flags), SHAPE["max_position_embeddings"]
    whole = run(generate_rollout_async(args, 0, make_source(args))).samples
    answer_log_for(run_config(args), context).begin(0, source := make_source(args))
    run(generate_rollout_async(args, 0, source))
    lines = next(directory.glob("*.jsonl")).read_bytes().splitlines(keepends=True)
    for count in (len(lines) // 3, 2 * len(lines) // 3):
        for path in directory.glob("*.jsonl"):
            path.unlink()
        (directory / "tokens_00000000.jsonl").write_bytes(b"".join(lines[:count]))
        left = read_answers(directory)[0].values()
        assert any(answer.response is None for answer in left) and any(answer.response for answer in left)
        client.flush_idle_cache()
        log = answer_log_for(run_config(args), context)
        log.read()
        log.begin(0, source := make_source(args))
        again = run(generate_rollout_async(args, 0, source)).samples
        restored = {"rollout/restored_tokens": sum(len(answer.tokens) for answer in left)}
        assert log.end(source) == restored
        for now, before in zip(flatten(again), flatten(whole), strict=True):
            assert (now.tokens, now.response, now.reward) == (before.tokens, before.response, before.reward)
            assert now.rollout_log_probs == pytest.approx(before.rollout_log_probs, abs=1e-5)
