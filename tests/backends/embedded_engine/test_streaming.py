"""Streams that look at a response while the engine thread is in the middle of ending it."""

import asyncio
import json
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest

from slime.arguments.groups.embedded_engine import EmbeddedServerArgs
from slime.backends.embedded_engine.build import build_server
from slime.backends.embedded_engine.http.answers import Reading
from slime.backends.embedded_engine.http.openai_routes import ChatDialect, _events
from slime.backends.embedded_engine.http.prompts import Generation
from slime.backends.embedded_engine.http.responses import ResponseBuilder, final_text
from slime.backends.embedded_engine.http.running import ClientGone, run_to_end
from slime.backends.embedded_engine.http.state import ServerState
from slime.backends.embedded_engine.http.streaming import TextStream, stream_generation
from slime.backends.embedded_engine.sampling_params import SamplingParams
from slime.backends.embedded_engine.sequence import LogprobOptions, Sequence
from slime.backends.embedded_engine.stopping import StopChecker
from slime.utils.model_inputs import SequenceInputs

LENGTH = 8
PRINTABLE = 94
"""Ids below this one are one character of ASCII each."""


def sequence(**params) -> Sequence:
    return Sequence(
        "one", SequenceInputs([104, 105]), SamplingParams(**params), LogprobOptions(wanted=True), noise_seed=0
    )


@pytest.fixture
def state(checkpoint, request):
    return build_server(
        EmbeddedServerArgs(model_path=str(checkpoint[0]), incremental_streaming_output=request.param)
    )


@pytest.fixture
def stopping(state) -> Sequence:
    """A greedy response whose last token ends it and would show as text."""
    scheduler = state.engine.scheduler
    biases = tuple((token, -100.0) for token in range(PRINTABLE, 320))
    common = {"temperature": 0.0, "max_new_tokens": LENGTH, "logit_bias": biases, "repetition_penalty": 9.0}
    free = sequence(ignore_eos=True, **common)
    scheduler.waiting.append(free)
    while scheduler.live:
        scheduler.step(admit=True)
    assert len(set(free.output_ids)) == LENGTH
    scheduler.touched.clear()
    return sequence(stop_token_ids=frozenset(free.output_ids[-1:]), **common)


def look_before_each_decision(state: ServerState, monkeypatch) -> None:
    """Lets the event loop serve the stream between a new token and the decision whether it was the last."""
    loop, decide = asyncio.get_running_loop(), StopChecker.reason

    def reason(self, sequence, token):
        loop.call_soon_threadsafe(sequence.on_progress)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), loop).result(60)
        return decide(self, sequence, token)

    monkeypatch.setattr(StopChecker, "reason", reason)


def end_before_the_first_text(state: ServerState, monkeypatch) -> None:
    """Holds the stream back, once it has chosen to show a part, until the engine has ended the response."""
    text = TextStream.text

    def late(self, *args):
        deadline = time.monotonic() + 60
        while not self._sequence.finished and time.monotonic() < deadline:
            time.sleep(0.001)
        return text(self, *args)

    monkeypatch.setattr(TextStream, "text", late)


async def events(stream) -> list[dict]:
    lines = [line.decode().removeprefix("data: ").strip() async for line in stream]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("disturb", [look_before_each_decision, end_before_the_first_text])
@pytest.mark.parametrize("state", [False, True], ids=["whole", "incremental"], indirect=True)
async def test_a_stream_shows_no_stop_token_and_ends_once(state, stopping, disturb, monkeypatch):
    disturb(state, monkeypatch)
    state.engine.start(asyncio.get_running_loop())
    generation = Generation([stopping], single=True)
    answers = await events(stream_generation(state, generation, [ResponseBuilder(stopping, state.tokenizer)]))
    state.engine.stop()
    whole = final_text(stopping, state.tokenizer)
    assert len(stopping.output_ids) == LENGTH and len(whole) == LENGTH - 1
    reasons = [a["meta_info"]["finish_reason"] for a in answers]
    assert reasons == [None] * (len(answers) - 1) + [{"type": "stop", "matched": stopping.output_ids[-1]}]
    final = [reason is not None for reason in reasons]
    assert ["weight_versions" in a["meta_info"] for a in answers] == final
    if state.args.incremental_streaming_output:
        assert "".join(a["text"] for a in answers) == whole
        assert [token for a in answers for token in a["output_ids"]] == stopping.output_ids
    else:
        assert all(whole.startswith(a["text"]) for a in answers) and answers[-1]["text"] == whole
        assert answers[-1]["output_ids"] == stopping.output_ids
    for answer in answers:
        found = answer["meta_info"]["output_token_logprobs"]
        assert [token for _, token, _ in found] == answer["output_ids"]


@pytest.mark.parametrize("disturb", [look_before_each_decision, end_before_the_first_text])
@pytest.mark.parametrize("state", [False], ids=[""], indirect=True)
async def test_a_stream_of_chunks_shows_no_stop_token_and_ends_once(state, stopping, disturb, monkeypatch):
    disturb(state, monkeypatch)
    state.engine.start(asyncio.get_running_loop())
    dialect = ChatDialect(state.tokenizer, Reading({}), logprobs=True)
    chunks = await events(_events(state, dialect, dialect.head(state, True, None), [stopping], None))
    state.engine.stop()
    choices = [chunk["choices"][0] for chunk in chunks]
    whole = final_text(stopping, state.tokenizer)
    assert "".join(c["delta"]["content"] for c in choices) == whole and len(whole) == LENGTH - 1
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert all(bool(c["logprobs"]) == bool(c["delta"]["content"]) for c in choices)
    last = 1 if choices[-1]["delta"]["content"] else 0  # the stop token's goes with a text beside it
    assert sum(len(c["logprobs"]["content"]) for c in choices if c["logprobs"]) == LENGTH - 1 + last


@pytest.mark.parametrize("state", [False], ids=[""], indirect=True)
async def test_a_response_nobody_waits_for_is_aborted_and_one_that_ended_is_not(state, monkeypatch):
    async def gone():
        return {"type": "http.disconnect"}

    async def stays():
        await asyncio.Event().wait()

    aborted, scheduler = [], state.engine.scheduler
    abort = scheduler.abort

    def noted(sequences, *reason):
        aborted.extend(sequences)
        abort(sequences, *reason)

    monkeypatch.setattr(scheduler, "abort", noted)
    state.engine.start(asyncio.get_running_loop())
    short = sequence(ignore_eos=True, max_new_tokens=2)
    await run_to_end(state, SimpleNamespace(receive=stays), [short])
    assert len(short.output_ids) == 2 and aborted == []
    endless = sequence(ignore_eos=True, max_new_tokens=400)
    with suppress(ClientGone):
        await run_to_end(state, SimpleNamespace(receive=gone), [endless])
    state.engine.stop()
    assert aborted == [endless] and endless.finished
    assert not state.live_rids
