"""The scheduler without a server: limits, sharing, recomputation, and a step that fails."""

import asyncio
import random
from itertools import islice
from types import SimpleNamespace

import pytest

from slime.arguments.groups.embedded_engine import EmbeddedServerArgs
from slime.backends.embedded_engine import engine
from slime.backends.embedded_engine.build import build_server
from slime.backends.embedded_engine.http.info_routes import load_of
from slime.backends.embedded_engine.http.responses import ResponseBuilder
from slime.backends.embedded_engine.http.state import ServerState
from slime.backends.embedded_engine.kv_cache import KVCache
from slime.backends.embedded_engine.sampling_params import SamplingParams
from slime.backends.embedded_engine.sequence import LogprobOptions, Sequence
from slime.utils.model_inputs import SequenceInputs
from tests.engines.embedded import make_checkpoint

pytestmark = pytest.mark.slow


def make_state(checkpoint, **changes) -> ServerState:
    return build_server(
        EmbeddedServerArgs(model_path=str(checkpoint[0]), skip_tokenizer_init=True, **changes)
    )


def sequence(rid: str, prompt: list[int], options=None, **params) -> Sequence:
    params = SamplingParams(**{"ignore_eos": True, "max_new_tokens": 4, **params})
    return Sequence(rid, SequenceInputs(prompt), params, options or LogprobOptions(), noise_seed=len(rid))


def run_all(scheduler, check=lambda: None) -> None:
    while scheduler.live:
        scheduler.step(admit=True)
        check()


def allocated(scheduler) -> int:
    """Tokens that the cache has memory for."""
    _, rows, _, length, _ = scheduler._executor.cache.k.shape
    return rows * length


def test_the_cache_never_holds_more_than_its_limits(checkpoint):
    scheduler = make_state(checkpoint, max_total_tokens=100, max_running_requests=3).engine.scheduler
    sequences = [sequence(str(i), [1 + i] * (5 + 9 * (i % 3)), max_new_tokens=3 + i) for i in range(12)]
    scheduler.waiting.extend(sequences)

    def check() -> None:
        running = scheduler.running
        assert len(running) <= 3
        assert len(running) <= 1 or len(running) * max(s.max_length for s in running) <= 100
        assert allocated(scheduler) <= 100

    run_all(scheduler, check)
    assert [len(s.output_ids) for s in sequences] == [3 + i for i in range(12)]


def test_the_load_is_what_runs_what_waits_and_what_is_held(checkpoint, monkeypatch):
    state = make_state(
        checkpoint, max_running_requests=2, max_total_tokens=200, chunked_prefill_size=16, context_length=200
    )
    scheduler, clock = state.engine.scheduler, iter([10.0, 10.5])
    monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    scheduler.waiting.extend(sequence(str(i), [i] * 5, max_new_tokens=9) for i in range(3))
    state.engine._step()
    load = load_of(state)
    # Each of the two has its first token and another one.
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_used_tokens"]) == (2, 1, 14)
    assert (load["token_usage"], load["gen_throughput"], scheduler.generated_tokens) == (14 / 200, 8.0, 4)
    run_all(scheduler)
    scheduler.waiting.append(sequence("long", [1] * 40))
    scheduler.step(admit=True)
    assert scheduler.partial and (load_of(state)["num_running_reqs"], load_of(state)["num_used_tokens"]) == (
        1,
        0,
    )


def test_an_answer_tells_what_it_took(checkpoint):
    scheduler, one = make_state(checkpoint).engine.scheduler, sequence("a", [1, 2, 3])
    builder = ResponseBuilder(one, None, prompt_ids=True)
    scheduler.waiting.append(one)
    run_all(scheduler)
    answer = builder.build(None, "7")
    meta = answer["meta_info"]
    assert answer["prompt_token_ids"] == [1, 2, 3] and answer["output_ids"] == one.output_ids
    assert 0 <= meta["e2e_latency"] < 3600 and meta["weight_version"] == "7"
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["reasoning_tokens"]) == (3, 4, 0)
    assert meta["cached_tokens_details"] == {"device": 0, "host": 0}
    plain = ResponseBuilder(one, None).build("text", "7")
    assert "prompt_token_ids" not in plain and plain["text"] == "text"


def test_a_request_without_a_seed_has_that_of_sglang_where_results_must_repeat(checkpoint):
    state = make_state(checkpoint, enable_deterministic_inference=True)
    assert (state.noise_seed(None, 1), state.noise_seed(7, 1)) == (43, 8)
    other = make_state(checkpoint)
    assert other.noise_seed(None, 0) != other.noise_seed(None, 0)


def test_rows_stay_without_holes_and_keep_their_sequences(checkpoint):
    state = make_state(checkpoint, enable_deterministic_inference=True)
    lengths = [7, 2, 5, 1, 9, 3]
    together = [sequence(str(i), [i, i + 1], max_new_tokens=n) for i, n in enumerate(lengths)]
    state.engine.scheduler.waiting.extend(together)
    run_all(state.engine.scheduler)
    for one in together:
        alone = sequence(one.rid, one.prompt_ids, max_new_tokens=one.params.max_new_tokens)
        state.engine.scheduler.waiting.append(alone)
        run_all(state.engine.scheduler)
        assert alone.output_ids == one.output_ids
        assert alone.output_logprobs.of_tokens == one.output_logprobs.of_tokens


KINDS = [{}, {"top_p": 0.9}, {"top_k": 20}, {"temperature": 0.7, "min_p": 0.05}, {"frequency_penalty": 0.3}]


def mixed_requests(count: int = 24) -> list[Sequence]:
    """Prompts of 1 to 299 tokens, some of them twice, with all kinds of sampling."""
    random_ = random.Random(2)
    found: list[Sequence] = []
    for i in range(count):
        prompt = [random_.randrange(256) for _ in range(random_.choice([1, 3, 7, random_.randrange(1, 300)]))]
        if i % 5 == 4:
            prompt = found[-1].prompt_ids
        new = random_.randrange(1, 40)
        found.append(sequence("r" * (i % 7), prompt, max_new_tokens=new, **KINDS[i % len(KINDS)]))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "heads"),
    [("qwen3", (4, 4)), ("qwen3", (7, 1)), ("qwen3_moe", (4, 2))],
    ids=["one query per key", "seven queries per key", "experts"],
)
def test_no_bit_of_a_response_depends_on_its_company(tmp_path, family, heads, dtype):
    shape = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 64}
    make_checkpoint(tmp_path, family, hidden_size=256, vocab_size=2048, **shape)
    changes = {"dtype": dtype, "chunked_prefill_size": 256}
    compared = slice(None, None, 3)  # of every kind of sampling, prompts that come twice among them
    alone, together = mixed_requests()[compared], mixed_requests()
    scheduler = make_state((tmp_path,), **changes).engine.scheduler
    for one in alone:
        scheduler.waiting.append(one)
        run_all(scheduler)
    scheduler = make_state((tmp_path,), max_running_requests=9, **changes).engine.scheduler
    arriving = iter(together)
    while scheduler.live or not scheduler.generated_tokens:
        scheduler.waiting.extend(islice(arriving, scheduler.generated_tokens % 4))
        scheduler.waiting.extend(islice(arriving, not scheduler.live))
        if scheduler.live:
            scheduler.step(admit=True)
    assert [s.output_ids for s in together[compared]] == [s.output_ids for s in alone]
    assert [s.output_logprobs for s in together[compared]] == [s.output_logprobs for s in alone]


def test_the_cache_gives_up_rows_to_grow_in_length_and_back(checkpoint):
    config = make_state(checkpoint).config
    cache = KVCache(config, 256, 16384, max_tokens=256 * 120)
    for rows, length in [(256, 120), (1, 9000), (200, 20), (3, 10000), (256, 1)]:
        cache.reserve(rows, length)
        assert cache.k.shape[1] >= rows and cache.k.shape[3] >= length
        assert cache.k.shape[1] * cache.k.shape[3] <= 256 * 120
        if rows == 1:
            cache.k[:, 0, :, :20] = 3.0
    assert (cache.k[:, 0, :, 0] == 3.0).all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_bursts_and_long_responses_take_turns_in_the_cache(checkpoint, deterministic):
    def requests() -> list[Sequence]:
        burst = [sequence(f"b{i}", [2 + i // 2] * 5, max_new_tokens=3 + i % 4) for i in range(12)]
        long = sequence("long", list(range(1, 41)), max_new_tokens=100)
        few = [sequence(f"few{i}", [50 + i] * 12, max_new_tokens=20 + i) for i in range(6)]
        again = [sequence(f"a{i}", [90 + i] * 3, max_new_tokens=4) for i in range(20)]
        return [*burst, long, *few, *again]

    changes = {"enable_deterministic_inference": deterministic, "chunked_prefill_size": 16}
    tight, roomy = requests(), requests()
    shapes = set()
    scheduler = make_state(checkpoint, max_total_tokens=280, **changes).engine.scheduler

    def check() -> None:
        assert allocated(scheduler) <= 280
        shapes.add(scheduler._executor.cache.k.shape[1:4:2])

    scheduler.waiting.extend(tight)
    run_all(scheduler, check)
    assert len(shapes) > 3
    scheduler = make_state(checkpoint, **changes).engine.scheduler
    for one in roomy:
        scheduler.waiting.append(one)
        run_all(scheduler)
    for one, other in zip(tight, roomy, strict=True):
        assert one.output_ids == other.output_ids
        assert one.output_logprobs.of_tokens == other.output_logprobs.of_tokens


def test_prompts_are_shared_until_the_weights_change(checkpoint):
    scheduler = make_state(checkpoint).engine.scheduler
    names = ["first", "same", "after"]
    first, same, after = (sequence(name, [1, 2, 3, 4], max_new_tokens=30) for name in names)
    scheduler.waiting.extend([first, same])
    scheduler.step(admit=True)
    scheduler.forget_shared()
    scheduler.waiting.append(after)
    run_all(scheduler)
    assert [s.cached_tokens for s in (first, same, after)] == [0, 4, 0]


@pytest.mark.parametrize("updated", [False, True])
def test_a_long_prompt_is_not_shared_if_the_weights_change_in_its_middle(checkpoint, updated):
    state = make_state(checkpoint, chunked_prefill_size=8)
    scheduler = state.engine.scheduler
    first, after = (sequence(name, list(range(30)), max_new_tokens=60) for name in ("first", "after"))
    scheduler.waiting.append(first)
    scheduler.step(admit=True)
    if updated:
        state.parameters.flat.mul_(1.1)
        scheduler.forget_shared()
    while scheduler.partial:
        scheduler.step(admit=True)
    scheduler.waiting.append(after)
    run_all(scheduler)
    assert after.cached_tokens == (0 if updated else 30)


OPTIONS = LogprobOptions(wanted=True, prompt_start=3, top=2, token_ids=(7, 9))


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 6])
def test_a_retracted_prompt_has_the_logprobs_of_an_undisturbed_one(checkpoint, steps):
    scheduler = make_state(checkpoint, chunked_prefill_size=8).engine.scheduler
    undisturbed, retracted = (sequence("same", list(range(30)), OPTIONS, max_new_tokens=6) for _ in range(2))
    scheduler.waiting.append(undisturbed)
    run_all(scheduler)
    scheduler.waiting.append(retracted)
    for _ in range(steps):
        scheduler.step(admit=True)
    scheduler.retract()
    run_all(scheduler)
    assert len(undisturbed.prompt_logprobs.of_tokens) == 27
    assert retracted.prompt_logprobs == undisturbed.prompt_logprobs
    meta = ResponseBuilder(retracted, None).build(None, "")["meta_info"]
    for name in ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"):
        assert len(meta[name]) == 27


def test_a_prompt_that_is_aborted_in_its_middle_has_no_logprobs(checkpoint):
    scheduler = make_state(checkpoint, chunked_prefill_size=8).engine.scheduler
    one = sequence("a", list(range(30)), OPTIONS)
    scheduler.waiting.append(one)
    scheduler.step(admit=True)
    scheduler.abort([one])
    meta = ResponseBuilder(one, None).build(None, "")["meta_info"]
    assert meta["finish_reason"]["type"] == "abort" and meta["input_token_logprobs"] == []


async def answer(state: ServerState, *sequences: Sequence) -> list:
    done = asyncio.Event()
    for one in sequences:
        one.on_finish = lambda: done.set() if all(s.finished for s in sequences) else None
    state.engine.submit(list(sequences))
    await asyncio.wait_for(done.wait(), 60)
    return [s.finish_reason for s in sequences]


async def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(checkpoint, monkeypatch):
    state = make_state(checkpoint)
    state.engine.start(asyncio.get_running_loop())

    def fail(*args):
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(state.engine.scheduler._executor, "decode", fail)
        reasons = await answer(state, sequence("a", [1]), sequence("b", [2]))
    assert {r["status_code"] for r in reasons} == {500} and "out of luck" in reasons[0]["message"]
    assert (await answer(state, sequence("c", [3])))[0]["type"] == "length"
    with pytest.raises(ZeroDivisionError):
        await state.engine.run(lambda: 1 // 0)
    assert state.engine.alive
    state.engine.stop()
    assert not state.engine.alive


@pytest.mark.parametrize("new", [0, 3])
def test_a_model_whose_logits_are_nan_gives_an_error_and_no_token(checkpoint, new):
    state = make_state(checkpoint)
    state.parameters.named["model.norm.weight"].fill_(float("nan"))
    broken = sequence("broken", [1, 2, 3], max_new_tokens=new)
    state.engine.scheduler.waiting.append(broken)
    run_all(state.engine.scheduler)
    assert broken.output_ids == []
    assert broken.finish_reason["type"] == "abort" and broken.finish_reason["status_code"] == 400
    assert "NaN" in broken.finish_reason["message"]
