"""Spans of samples, as user code records them."""

import asyncio
import json

import pytest

from slime.observability.trace_utils import (
    bind_trace,
    build_sglang_meta_trace_attrs,
    export_trace,
    import_trace,
    trace_event,
    trace_function,
    trace_next_attempt,
    trace_span,
)
from slime.utils.types import Sample


def events(sample):
    return sample.trace["events"]


def test_a_span_has_two_ends_and_what_was_learnt_within():
    sample = Sample(index=3, group_index=1)
    with trace_span(sample, "search", attrs={"query": "q"}) as span:
        span.update({"passages": 2})
    start, end = events(sample)
    assert (start["type"], end["type"]) == ("span_start", "span_end")
    assert start["span_id"] == end["span_id"] and start["parent_span_id"] is None
    assert (start["attrs"], end["attrs"]) == ({"query": "q"}, {"passages": 2})
    assert (start["sample_id"], start["group_id"], start["attempt"]) == (3, 1, 0)
    assert start["ts"] <= end["ts"]


def test_spans_nest_by_sample():
    sample, other = Sample(index=0), Sample(index=1)
    with trace_span([sample, other], "group"), trace_span(sample, "inner"):
        trace_event(sample, "seen")
        trace_event(other, "seen")
    outer, inner, seen, *_ = events(sample)
    assert inner["parent_span_id"] == outer["span_id"] and seen["parent_span_id"] == inner["span_id"]
    assert events(other)[1]["parent_span_id"] == events(other)[0]["span_id"]
    trace_event(sample, "later")
    assert events(sample)[-1]["parent_span_id"] is None


async def test_tasks_do_not_see_each_other_s_spans():
    sample = Sample(index=0)
    inside = asyncio.Event()

    async def first():
        with trace_span(sample, "first"):
            inside.set()
            await asyncio.sleep(0)

    async def second():
        await inside.wait()
        trace_event(sample, "second")

    await asyncio.gather(first(), second())
    (event,) = [event for event in events(sample) if event["name"] == "second"]
    assert event["parent_span_id"] is None


@pytest.mark.parametrize("record", [True, False])
def test_an_error_ends_the_span_and_goes_on(record):
    sample = Sample()
    with pytest.raises(KeyError), trace_span(sample, "tool", record_error=record):
        raise KeyError("x")
    assert events(sample)[-1]["attrs"] == ({"error": "KeyError: 'x'"} if record else {})


async def test_functions_are_spans():
    @trace_function("plain", target="sample", attrs_getter=lambda sample, n: {"n": n})
    def plain(sample, n):
        return n + 1

    @trace_function("awaited", target_getter=lambda samples: samples)
    async def awaited(samples):
        return len(samples)

    sample = Sample()
    assert plain(sample, 1) == 2 and await awaited([sample, Sample()]) == 2
    assert [event["name"] for event in events(sample)] == ["plain"] * 2 + ["awaited"] * 2
    assert events(sample)[0]["attrs"] == {"n": 1}
    with pytest.raises(ValueError, match="wanted target or target_getter"):
        trace_function("neither")


def test_attempts_are_counted_and_traces_are_plain_data():
    sample = Sample(index=5)
    trace_event(sample, "a")
    trace_next_attempt(sample)
    handle = import_trace(json.loads(json.dumps(export_trace(sample))))
    trace_event(handle, "b")
    with trace_span(handle, "c"):
        trace_event(handle, "d")
    assert [event["attempt"] for event in handle.trace["events"]] == [0, 1, 1, 1, 1]
    assert handle.trace["events"][3]["parent_span_id"] == handle.trace["events"][2]["span_id"]
    assert handle.trace["events"][1]["sample_id"] == 5 and len(events(sample)) == 1
    assert Sample.from_dict(sample.to_dict()).trace == sample.trace
    assert bind_trace(handle) is handle


def test_what_an_engine_says_of_an_answer_becomes_attributes():
    meta = {"finish_reason": {"type": "stop"}, "prompt_tokens": 2, "output_token_logprobs": [[0, 1, None]]}
    assert build_sglang_meta_trace_attrs(meta) == {"finish_reason": "stop", "prompt_tokens": 2}
