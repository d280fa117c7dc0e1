import asyncio
import itertools
import json
import threading

import pytest
from fastapi.responses import Response

from slime.rollout.base_types import RolloutError
from slime.rollout.generate_state import GenerateState
from slime.rollout.sglang_rollout import generate, generate_rollout_async
from slime.rollout.sglang_streaming_rollout import generate_streaming
from slime.utils.http_utils import HttpStatusError
from slime.utils.types import Sample
from tests.engines.fake import NEVER
from tests.rollout.test_sglang_rollout import StopsAfter, balanced, question

STREAMING = "slime.rollout.sglang_streaming_rollout.generate_streaming"
PROMPT = "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n"


def asked(args):
    return Sample(prompt=PROMPT, index=0), dict(GenerateState(args).sampling_params)


async def test_the_sample_is_that_of_the_default_function(engine, make_args):
    args = make_args()
    engine.answer = lambda conversation: "aé字b"
    streamed = await generate_streaming(args, *asked(args))
    assert streamed == await generate(args, *asked(args))
    assert engine.seen("generate")[0]["stream"] is True


async def test_the_sample_grows_with_every_chunk(engine, make_args):
    args = make_args()
    engine.answer = lambda conversation: "abcd"
    seen, reached = [], asyncio.Event()
    sample, params = asked(args)
    steps = itertools.count()

    def delay(conversation):
        return NEVER if next(steps) == 3 else 0.0

    engine.delay = delay
    task = asyncio.ensure_future(generate_streaming(args, sample, params))
    while sample.response_length < 3:
        await asyncio.sleep(0.01)
    seen = (sample.response, sample.response_length, list(sample.rollout_log_probs), sample.version_spans)
    assert seen == ("abc", 3, [-0.25] * 3, [("1", 3)])
    assert sample.status is Sample.Status.PENDING and not reached.is_set()
    engine.aborts += 1
    assert (await task).status is Sample.Status.ABORTED
    assert task.result().response_length == 3
    assert task.result().weight_versions == ["1"]


async def test_an_abort_of_the_rollout_ends_the_stream_at_once(engine, make_args):
    args = make_args()
    engine.answer = lambda conversation: "abcdefgh"
    tokens, go_on = itertools.count(), threading.Event()
    engine.delay = lambda conversation: 0.0 if next(tokens) < 2 else go_on.is_set
    sample, params = asked(args)
    task = asyncio.ensure_future(generate_streaming(args, sample, params))
    while sample.response_length < 2:
        await asyncio.sleep(0.005)
    GenerateState(args).aborted = True
    go_on.set()
    await task
    assert sample.status is Sample.Status.ABORTED
    assert sample.response_length == 3, "the stream is left with the first token that comes after the abort"
    assert sample.weight_versions == ["1"] and sample.version_spans == [("1", sample.response_length)]
    GenerateState(args).aborted = False
    engine.delay = lambda conversation: 0.0
    await generate_streaming(args, sample, params)
    assert sample.response == "abcdefgh<|im_end|>"
    assert sample.status is Sample.Status.COMPLETED
    assert sample.weight_versions == ["1", "1"]


async def test_a_connection_that_breaks_before_the_first_token_is_made_again(engine, make_args, monkeypatch):
    monkeypatch.setattr("slime.rollout.sglang_streaming_rollout.RETRY_PAUSE_S", 0.0)
    args = make_args()
    engine.breaks_after = 0  # the answer has begun: headers were sent
    sample = await generate_streaming(args, *asked(args))
    assert sample == await generate(args, *asked(args))
    assert len(engine.seen("generate")) == 3


async def test_a_connection_that_breaks_costs_no_token(engine, make_args):
    args = make_args()
    engine.answer = lambda conversation: "abcdef"
    engine.breaks_after = 3
    sample = await generate_streaming(args, *asked(args))
    assert sample.response == "abcdef<|im_end|>"
    assert sample.status is Sample.Status.COMPLETED
    first, second = engine.seen("generate")
    assert len(second["input_ids"]) == len(first["input_ids"]) + 3
    assert second["sampling_params"]["max_new_tokens"] == first["sampling_params"]["max_new_tokens"] - 3


async def test_an_error_in_the_stream_is_an_error(engine, make_args, make_source):
    args = make_args(custom_generate_function_path=STREAMING)
    event = b'data: {"error": {"message": "too long", "code": 400}}\n\ndata: [DONE]\n\n'
    engine.answers["generate"] = lambda body: Response(event, media_type="text/event-stream")
    with pytest.raises(RolloutError, match=r"generate_streaming failed on sample \d .*HTTP 400: too long"):
        await generate_rollout_async(args, 0, make_source(args))


TOKEN = {"text": "a", "meta_info": {"output_token_logprobs": [[-0.25, 97, None]], "finish_reason": None}}


@pytest.mark.parametrize(
    ("before", "code"),
    [
        ([], 503),  # nothing to go on from
        ([TOKEN], 400),  # the rest would be refused as well
    ],
)
async def test_an_error_in_the_stream_ends_it_unless_the_rest_can_be_asked_for(
    engine, make_args, before, code
):
    args, events = make_args(), [*before, {"error": {"message": "no", "code": code}}]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    engine.answers["generate"] = lambda asked: Response(body, media_type="text/event-stream")
    with pytest.raises(HttpStatusError, match=f"HTTP {code}: no"):
        await generate_streaming(args, *asked(args))
    assert len(engine.seen("generate")) == 1


async def test_a_partial_rollout_keeps_what_was_streamed(engine, make_args, make_source):
    args = make_args(
        custom_generate_function_path=STREAMING,
        partial_rollout=True,
        over_sampling_batch_size=4,
        n_samples_per_prompt=1,
    )
    engine.answer = lambda conversation: "abcdefgh" if question(conversation) == 3 else "ok"
    stops = StopsAfter(3, tokens=4)
    has_come = lambda: any(group[0].response_length == 4 for group in [*GenerateState(args).pending.values()])
    engine.delay = lambda conversation: stops(conversation) if question(conversation) == 3 else has_come
    source = make_source(args)
    await generate_rollout_async(args, 0, source)
    assert source.buffer[0][0].response_length == 4
    assert balanced(source)
    engine.delay = lambda conversation: 0.0
    args.over_sampling_batch_size = 3  # else three others may be finished first
    output = await generate_rollout_async(args, 1, source)
    assert output.samples[0][0].response == "abcdefgh<|im_end|>"
    assert balanced(source)


async def test_a_list_that_user_code_holds_grows_and_is_never_cut(engine, make_args):
    engine.answer = lambda conversation: "a long answer of words"
    args = make_args()
    sample, params = asked(args)
    sample.loss_mask = mask = []
    await generate_streaming(args, sample, params)
    assert mask is sample.loss_mask and len(mask) == sample.response_length > 3
