"""The scheduler without a server: limits, sharing, and a step that fails."""

import asyncio

import pytest

from slime.backends.embedded_engine.build import build_server
from slime.backends.embedded_engine.http.state import ServerState
from slime.backends.embedded_engine.sampling_params import SamplingParams
from slime.backends.embedded_engine.sequence import LogprobOptions, Sequence
from slime.utils.arguments.embedded_engine import EmbeddedServerArgs


def make_state(checkpoint, **changes) -> ServerState:
    return build_server(
        EmbeddedServerArgs(model_path=str(checkpoint[0]), skip_tokenizer_init=True, **changes)
    )


def sequence(rid: str, prompt: list[int], **params) -> Sequence:
    params = SamplingParams(**{"ignore_eos": True, "max_new_tokens": 4, **params})
    return Sequence(rid, prompt, params, LogprobOptions(), noise_seed=len(rid))


def run_all(scheduler, check=lambda: None) -> None:
    while scheduler.live:
        scheduler.step(admit=True)
        check()


def test_the_cache_never_holds_more_than_its_limits(checkpoint):
    scheduler = make_state(checkpoint, max_total_tokens=100, max_running_requests=3).engine.scheduler
    sequences = [sequence(str(i), [1 + i] * (5 + 9 * (i % 3)), max_new_tokens=3 + i) for i in range(12)]
    scheduler.waiting.extend(sequences)

    def check() -> None:
        running = scheduler.running
        assert len(running) <= 3
        assert len(running) <= 1 or len(running) * max(s.max_length for s in running) <= 100

    run_all(scheduler, check)
    assert [len(s.output_ids) for s in sequences] == [3 + i for i in range(12)]


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


async def answer(state: ServerState, *sequences: Sequence) -> list:
    done = asyncio.Event()
    for one in sequences:
        one.on_finish = lambda: done.set() if all(s.finished for s in sequences) else None
    state.engine.submit(list(sequences))
    await asyncio.wait_for(done.wait(), 10)
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
