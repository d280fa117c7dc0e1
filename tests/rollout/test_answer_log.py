"""Answers that go on where a rollout manager was lost, with an engine that a test stops."""

import asyncio
import time
from pathlib import Path

import pytest

from slime.rollout import answer_log
from slime.rollout.answer_log import answer_log_for
from slime.rollout.fully_async_rollout import generate_rollout_fully_async, stop_worker
from slime.rollout.generate_state import GenerateState
from slime.rollout.sglang_rollout import generate_rollout_async
from slime.rollout.token_log import read_answers
from slime.utils.types import EARLIER_TOKENS, Sample
from slime.utils.weight_clock import clock
from tests.rollout.test_sglang_rollout import question
from tests.run_args import run_config

STREAMING = "slime.rollout.sglang_streaming_rollout.generate_streaming"
CONTEXT = 1000
LONG = "abcdefghijkl"


@pytest.fixture
def logged(make_args, tmp_path, monkeypatch):
    monkeypatch.setattr(answer_log, "_current", None)
    monkeypatch.setattr(answer_log, "note", told.append)
    told.clear()
    own = {"token_log_dir": str(tmp_path / "log"), "token_log_interval": 4, "use_fault_tolerance": True}
    return lambda **overrides: make_args(**{**own, **overrides})


told = []


def begun(args, rollout_id, source, restored=False):
    """The log of a manager that begins a rollout, perhaps after it has taken another's place."""
    log = answer_log_for(run_config(args), CONTEXT)
    if restored:
        log.read()
    log.begin(rollout_id, source)
    return log


class Stuck:
    """Question 1 stops after some tokens of an answer, until it is free; others are answered."""

    def __init__(self, tokens):
        self.tokens, self.made, self.free = tokens, 0, False

    def __call__(self, conversation):
        if question(conversation) != 1:
            return 0.0
        self.made += 1
        return 0.0 if self.made <= self.tokens else lambda: self.free


async def lose(args, source, engine, rollout_id=0):
    """Makes a rollout whose first answers are stuck, until all that comes is logged, and drops it."""
    task = asyncio.ensure_future(generate_rollout_async(args, rollout_id, source))
    while True:
        found = read_answers(Path(args.token_log_dir))[0]
        if sorted(len(answer.tokens) for answer in found.values()) == [3, 3, 3, 8]:
            break
        assert not task.done()
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    engine.aborts += 1
    engine.delay = lambda conversation: 0.0
    engine.calls.clear()
    GenerateState.clear()


def flags(**overrides):
    return dict(n_samples_per_prompt=1, rollout_batch_size=4, over_sampling_batch_size=4) | overrides


@pytest.mark.parametrize("path", [None, STREAMING])
async def test_another_manager_goes_on_with_every_token(engine, logged, make_source, path):
    args = logged(custom_generate_function_path=path, **flags())
    engine.answer = lambda conversation: LONG if question(conversation) == 1 else "ok"
    whole = (await generate_rollout_async(args, 0, make_source(args))).samples
    engine.delay = Stuck(tokens=8 if path is None else 9)
    source = make_source(args)
    begun(args, 0, source)
    await lose(args, source, engine)
    engine.weight_version = "2"
    log = begun(args, 0, source := make_source(args), restored=True)
    samples = (await generate_rollout_async(args, 0, source)).samples
    asked = engine.seen("generate")
    assert {len(body["input_ids"]) for body in asked} == {len(whole[1][0].tokens) - 13 + at for at in (8, 12)}
    for (now,), (before,) in zip(samples, whole, strict=True):
        assert (now.tokens, now.response, now.status) == (before.tokens, before.response, before.status)
        assert (now.rollout_log_probs, now.loss_mask) == (before.rollout_log_probs, before.loss_mask)
        assert now.reward == before.reward
        assert now.metadata["start_rollout_id"] == 0
    (long,) = samples[1]
    assert long.version_spans == [("1", 8), ("2", 5)] and long.weight_versions == ["1", "2"]
    assert long.metadata[EARLIER_TOKENS] == 8
    assert [s.version_spans for (s,) in samples if s is not long] == [[("1", 3)]] * 3
    assert log.end(source) == {"rollout/restored_tokens": 8 + 3 * 3}
    assert log.end(source) == {} and not told


async def test_a_manager_that_is_lost_again_leaves_what_it_had_been_left(engine, logged, make_source):
    args = logged(**flags())
    engine.answer = lambda conversation: LONG if question(conversation) == 1 else "ok"
    engine.delay = Stuck(tokens=8)
    source = make_source(args)
    begun(args, 0, source)
    await lose(args, source, engine)
    begun(args, 0, make_source(args), restored=True)
    log = begun(args, 0, source := make_source(args), restored=True)
    await generate_rollout_async(args, 0, source)
    assert log.end(source) == {"rollout/restored_tokens": 8 + 3 * 3}


def resumed(args, source, rollout_id=0):
    """The log of a run that goes on from the checkpoint of the rollout before."""
    log = answer_log_for(run_config(args), CONTEXT)
    log.resume(rollout_id - 1)
    log.begin(rollout_id, source)
    return log


@pytest.mark.parametrize(
    ("load", "version_at", "restored", "dropped"),
    [
        ("saved", "1", 8 + 3 * 3, 0),
        ("saved", "2", 8 + 3 * 3, 0),
        ("saved", "0", 0, 4),  # the checkpoint is older than the weights that made all of it
        ("elsewhere", "1", 0, 4),
    ],
)
async def test_a_resumed_run_goes_on_with_what_its_weights_made(
    engine, logged, make_source, load, version_at, restored, dropped
):
    args = logged(save="saved", load=load, **flags())
    engine.answer = lambda conversation: LONG if question(conversation) == 1 else "ok"
    whole = (await generate_rollout_async(args, 0, make_source(args))).samples
    engine.delay = Stuck(tokens=8)
    source = make_source(args)
    clock.__init__()
    clock.end_update(int(version_at))
    begun(args, 0, source)
    await lose(args, source, engine)
    log = resumed(args, source := make_source(args))
    samples = (await generate_rollout_async(args, 0, source)).samples
    for (now,), (before,) in zip(samples, whole, strict=True):
        assert (now.tokens, now.response, now.reward) == (before.tokens, before.response, before.reward)
    found = {"rollout/restored_tokens": restored, "rollout/dropped_answers": dropped}
    assert log.end(source) == {name: count for name, count in found.items() if count}
    assert bool(told) == bool(dropped)
    if dropped:
        of = "weights up to version 0" if load == "saved" else "a checkpoint of another run"
        assert told[0].startswith("--token-log-dir: 4 of 4 answers begin anew")
        assert f"goes on from {of}: sample 0 of group 0, " in told[0]


async def test_parts_make_the_sample_that_one_request_makes(engine, logged, make_source):
    engine.answer = lambda conversation: LONG if question(conversation) == 1 else "ok"
    samples = []
    for interval in (100, 4, 1):
        args = logged(token_log_interval=interval, rollout_max_response_len=10, **flags())
        begun(args, 0, source := make_source(args))
        engine.calls.clear()
        output = await generate_rollout_async(args, 0, source)
        samples.append([sample for group in output.samples for sample in group])
        assert len(engine.seen("generate")) == {100: 4, 4: 6, 1: 19}[interval]
    for sample in [sample for made in samples for sample in made]:
        sample.session_id = sample.request_times = sample.prefix_cache_info = None
    assert samples[0] == samples[1] == samples[2]
    assert samples[0][1].status is Sample.Status.TRUNCATED and samples[0][1].response_length == 10


async def test_no_part_ends_where_engines_would_not_go_on(engine, logged, make_source):
    args = logged(**flags())
    engine.answer = lambda conversation: LONG
    log = answer_log_for(run_config(args), context=29)
    log.begin(0, source := make_source(args))
    await generate_rollout_async(args, 0, source)
    assert len(engine.seen("generate")) == 4


async def test_tokens_that_go_on_are_masked_where_those_of_partial_rollouts_are(engine, logged, make_source):
    args = logged(partial_rollout=True, mask_offpolicy_in_partial_rollout=True, **flags())
    engine.answer = lambda conversation: LONG if question(conversation) == 1 else "ok"
    engine.delay = Stuck(tokens=8)
    source = make_source(args)
    begun(args, 0, source)
    await lose(args, source, engine)
    begun(args, 0, source := make_source(args), restored=True)
    samples = (await generate_rollout_async(args, 0, source)).samples
    assert [group[0].loss_mask for group in samples] == [[1] * 3, [0] * 8 + [1] * 5, [1] * 3, [1] * 3]


async def test_another_prompt_under_the_same_number_begins_anew(engine, logged, make_source):
    args = logged(**flags())
    engine.answer = lambda conversation: LONG if question(conversation) == 1 else "ok"
    engine.delay = Stuck(tokens=8)
    source = make_source(args)
    begun(args, 0, source)
    await lose(args, source, engine)
    source = make_source(args)
    source.sample_offset = 1
    log = begun(args, 0, source, restored=True)
    samples = (await generate_rollout_async(args, 0, source)).samples
    assert [group[0].response_length for group in samples] == [13, 3, 3, 3]  # questions 1 to 4
    assert log.end(source) == {} and "sample 0 of group 0 begins anew" in told[0] and len(told) == 4


async def test_a_new_run_and_the_next_rollout_find_an_empty_log(engine, logged, make_source, tmp_path):
    args, directory = logged(**flags()), tmp_path / "log"
    log = begun(args, 0, source := make_source(args))
    await generate_rollout_async(args, 0, source)
    assert len(read_answers(directory)[0]) == 4
    log.end(source)
    log.begin(1, source)
    assert read_answers(directory)[0] == {}
    await generate_rollout_async(args, 1, source)
    assert len(read_answers(directory)[0]) == 4
    begun(args, 0, source)
    assert read_answers(directory)[0] == {}


def test_what_runs_across_rollouts_stays_in_the_log(engine, logged, make_source, tmp_path):
    """Of a fully asynchronous run, a group that has not been handed out when the next rollout begins."""
    clock.__init__()
    directory, stuck = tmp_path / "log", Stuck(tokens=6)
    args = logged(**flags(rollout_batch_size=2, sglang_server_concurrency=4, max_staleness=1))
    engine.answer = lambda conversation: LONG if question(conversation) == 1 else "ok"
    engine.delay = stuck
    log = begun(args, 0, source := make_source(args))
    try:
        output = generate_rollout_fully_async(args, 0, source)
        log.end(source)
        log.begin(1, source)
        handed_out = {(group[0].group_index, group[0].index) for group in output.samples}
        deadline = time.monotonic() + 120
        while not ((1, 1) in (found := read_answers(directory)[0]) and found[1, 1].tokens):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not handed_out & found.keys()
        stuck.free = True
        while not (found := read_answers(directory)[0])[1, 1].response:
            time.sleep(0.01)
        assert found[1, 1].response == f"{LONG}<|im_end|>" and len(found[1, 1].log_probs) == 13
    finally:
        stop_worker()


async def test_a_function_of_ones_own_is_not_logged(engine, logged, make_source, tmp_path):
    args = logged(custom_generate_function_path=f"{__name__}.own", **flags())
    begun(args, 0, source := make_source(args))
    await generate_rollout_async(args, 0, source)
    assert read_answers(tmp_path / "log")[0] == {}


async def own(args, sample, sampling_params):
    from slime.rollout.sglang_rollout import generate

    return await generate(args, sample, sampling_params)
