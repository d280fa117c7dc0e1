"""Spans of processes and samples, and the trace file that viewers open."""

import json

import pytest

from slime.observability.spans import Span, SpanList, TraceFile, sample_spans
from slime.observability.trace_utils import Span as SampleSpan
from slime.observability.trace_utils import span_of, trace_event, trace_span
from slime.utils.types import Sample
from tests.run_args import run_args


def events_of(path):
    """The events of a trace, whose array nobody closes while the run goes on."""
    return json.loads(path.read_text().rstrip().rstrip(",") + "]")


def test_a_span_is_measured_though_the_block_fails():
    spans = SpanList()
    with pytest.raises(ZeroDivisionError), spans.measure("step", rollout=3):
        1 / 0  # noqa: B018
    (span,) = spans.take()
    assert (span.name, span.attrs) == ("step", {"rollout": 3}) and span.start <= span.end
    assert spans.take() == []


def test_a_trace_names_its_processes_and_counts_in_microseconds(tmp_path):
    path = tmp_path / "traces" / "trace.json"
    trace = TraceFile(path)
    trace.write("driver", [Span("sleep", 10.0, 10.5, attrs={"rollout": 1})])
    trace.write("rank 0", [Span("train", 10.25, 11.0, lane=2)])
    trace.write("driver", [])
    first, sleep, second, train = events_of(path)
    assert (first["ph"], first["args"], second["args"]) == ("M", {"name": "driver"}, {"name": "rank 0"})
    assert (sleep["ph"], sleep["ts"], sleep["dur"], sleep["args"]) == ("X", 10e6, 5e5, {"rollout": 1})
    assert (train["name"], train["ts"], train["dur"], train["tid"]) == ("train", 10.25e6, 7.5e5, 2)
    assert sleep["pid"] == first["pid"] != train["pid"] == second["pid"]


def test_a_resumed_run_continues_the_file(tmp_path):
    for _ in range(2):
        trace = TraceFile(tmp_path / "trace.json")
        trace.write("driver", [Span("sleep", 1.0, 2.0)])
        trace.close()
    assert [event["name"] for event in events_of(tmp_path / "trace.json")] == ["process_name", "sleep"] * 2


def test_samples_that_overlap_get_lanes_of_their_own(monkeypatch):
    now = iter((1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
    monkeypatch.setattr("slime.observability.trace_utils.time.time", lambda: next(now))
    first, second, third = (Sample(index=i, group_index=7) for i in range(3))
    with (
        trace_span(first, "generate"),
        trace_span(second, "generate", attrs={"turn": 1}) as span,
    ):  # 1 and 2 to 4 and 3
        span.update(tokens=5)
    with trace_span(third, "generate"):  # 5 to 6
        pass
    placed = {span.attrs["sample"]: span for span in sample_spans([third, second, first, Sample()])}
    assert [(placed[i].start, placed[i].end, placed[i].lane) for i in range(3)] == [
        (1, 4, 1),
        (2, 3, 2),
        (5, 6, 1),
    ]
    assert placed[1].attrs == {"group": 7, "sample": 1, "attempt": 0, "turn": 1, "tokens": 5}


def test_a_span_that_has_not_ended_and_an_event_are_left_out():
    sample = Sample(index=0)
    unfinished = trace_span(sample, "generate")
    unfinished.__enter__()
    trace_event(sample, "seen")
    assert sample_spans([sample]) == []


def test_nothing_is_kept_of_a_sample_unless_asked_for():
    sample = Sample(index=0)
    with span_of(run_args(trace=None), sample, "generate") as span:
        span.update(tokens=5)
    assert isinstance(span, SampleSpan) and not hasattr(sample, "trace")
    with span_of(run_args(trace="trace.json"), [sample], "generate"):
        pass
    with span_of(run_args(otlp_endpoint="http://collector"), sample, "reward_model"):
        pass
    assert [span.name for span in sample_spans([sample])] == ["generate", "reward_model"]
