"""Spans as a collector of OpenTelemetry receives them."""

import logging
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from slime.observability import otlp
from slime.observability.otlp import CollectorError, OtlpSpans, nested, require_collector
from slime.observability.run_log import RunLog
from slime.observability.spans import Span
from slime.observability.tracking import Tracker
from tests.engines import free_port
from tests.otlp_collector import Collector


@pytest.fixture
def collector():
    with Collector() as collector:
        yield collector


def received(collector, spans, **options):
    """What comes of spans by process, by name."""
    sink = OtlpSpans(collector.url, "uid", "mine")
    for process, own in spans:
        sink.write(process, own)
    sink.close()
    return {span.name: span for span in collector.spans}


def test_a_span_keeps_its_times_and_attributes_and_each_process_is_a_resource(collector):
    now = 1_700_000_000.25
    attrs = {"sample": 3, "group": 1, "turn": True, "seconds": 0.5, "kind": "x", "none": None, "list": [1]}
    found = received(collector, [("rollouts", [Span("generate", now, now + 1, 2, attrs)]), ("driver", ())])
    span = found["generate"]
    assert (span.start, span.end) == pytest.approx((now, now + 1), abs=1e-6)
    assert span.attrs == {k: v for k, v in attrs.items() if k not in ("none", "list")} | {"list": "[1]"}
    assert span.resource["service.name"] == "slime" and span.resource["slime_run"] == "mine"
    assert span.resource["service.instance.id"] == "uid/rollouts" and span.error is None
    assert {path for path, _ in collector.requests} == {"/v1/traces"}


def test_what_the_format_cannot_hold_is_text_and_costs_no_other_span(collector):
    odd = {"large": 2**80, "half": "a\ud800b", "error": "ValueError: no"}
    found = received(collector, [("rollouts", [Span("odd", 1, 2, 0, odd), Span("plain", 1, 2, 1)])])
    assert found["odd"].attrs == {"large": str(2**80), "half": "a?b", "error": "ValueError: no"}
    assert found["odd"].error == "ValueError: no" and found["plain"].error is None


def test_each_part_of_a_run_is_a_trace_below_the_driver_s_span(collector, monkeypatch):
    moments = iter((10.0, 10.0, 20.0, 30.0, 40.0))
    monkeypatch.setattr("time.time", lambda: next(moments))
    sink = OtlpSpans(collector.url, "uid", "mine")
    log = RunLog(Tracker([]), [sink])
    log.start_loop()  # 20
    log.spans("rollouts", [Span("rollout", 21, 24), Span("generate", 22, 23, 1), Span("early", 12, 22, 1)])
    log.end_step(0)  # 30
    log.spans("actor rank 0", [Span("update_weights", 28, 29), Span("train", 31, 32)])
    monkeypatch.undo()
    log.close()
    found = {span.name: span for span in collector.spans}
    roots = {name: found[name] for name in ("start", "step", "end")}
    assert all(root.parent == b"" and root.process == "driver" for root in roots.values())
    assert len({root.trace for root in roots.values()}) == 3
    assert (roots["step"].start, roots["step"].end, roots["step"].attrs) == (20, 30, {"rollout": 0})
    above = {"early": "start", "rollout": "step", "generate": "rollout", "update_weights": "step"}
    for name, outer in (above | {"train": "end"}).items():
        assert (found[name].parent, found[name].trace) == (found[outer].id, found[outer].trace), name
    assert len({span.id for span in found.values()}) == len(found) == 8


def test_spans_lie_within_those_of_their_lane_or_of_the_process(collector):
    spans = [
        Span("rollout", 0, 10),
        Span("generate", 1, 9, 1),
        Span("turn", 2, 4, 1),
        Span("tool", 4, 6, 1),
        Span("other", 3, 5, 2),
        Span("late", 9, 12, 2),  # of a sample that the next rollout goes on with
        Span("convert", 10, 11),
        Span("point", 10.5, 10.5),
    ]
    found = {span.name: outer and outer.name for span, outer in nested(reversed(spans))}
    assert found == {
        "rollout": None,
        "generate": "rollout",
        "turn": "generate",
        "tool": "generate",
        "other": "rollout",
        "late": None,
        "convert": None,
        "point": "convert",
    }


def test_headers_come_from_the_environment(collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=s3cret")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=red")
    require_collector(f"{collector.url}/v1/traces/")
    resource = received(collector, [("driver", [Span("sleep", 1, 2)])])["sleep"].resource
    assert [headers["x-key"] for headers in collector.headers] == ["s3cret"] * 2
    assert (resource["service.name"], resource["team"]) == ("ours", "red")
    assert {path for path, _ in collector.requests} == {"/v1/traces"}


@pytest.mark.parametrize(
    ("status", "reason"),
    [(401, "HTTP 401 Unauthorized"), (404, "HTTP 404 Not Found"), (302, "HTTP 302 Found")],
)
def test_a_collector_that_refuses_is_named_at_the_start(collector, status, reason):
    collector.status = status
    with pytest.raises(CollectorError) as refused:
        require_collector(collector.url)
    assert str(refused.value) == (
        f"--otlp-endpoint {collector.url}: {collector.url}/v1/traces: {reason} "
        "(wanted: a collector that takes spans over HTTP)"
    )


def test_no_collector_is_told_with_its_reason_and_no_header_is(monkeypatch, capfd):
    monkeypatch.setattr(otlp, "_START_TIMEOUT_S", 0.5)
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(CollectorError, match=f"--otlp-endpoint {url}: .*Connection refused"):
        require_collector(url)
    for wrong in ("x-key=a%0As3cret", "s3cret"):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", wrong)
        with pytest.raises(CollectorError) as refused:
            require_collector(url)
        assert "s3cret" not in str(refused.value)
    assert "s3cret" not in "".join(capfd.readouterr())


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_collector_that_is_gone_is_told_once_and_at_the_end(monkeypatch, caplog):
    monkeypatch.setattr(otlp, "_EXPORT_TIMEOUT_S", 120)
    monkeypatch.setattr(otlp, "_DELAY_MS", 1)
    with Collector() as gone:
        sink = OtlpSpans(gone.url, "uid", "mine")
        sink.write("driver", [Span("sleep", 1, 2)])
        deadline = time.monotonic() + 120
        while sink._exporter.delivered < 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    quick, exporter = otlp._Exporter(gone.url, 0.2), sink._exporter
    exporter._session, exporter._real = quick._session, quick._real
    for given in (2, 3):
        sink.write("driver", [Span("sleep", 1, 2)])
        while sink._exporter.settled < given:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    sink.close()
    first, last = warnings_of(caplog)
    assert first.startswith(
        f"--otlp-endpoint: {gone.url}/v1/traces: spans are lost, the run goes on: Connection"
    )
    assert last == f"--otlp-endpoint: {gone.url}/v1/traces: 2 of 3 spans were not delivered"


@contextmanager
def silent_server():
    """Takes requests, and answers none."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_collector_that_gives_no_answer_delays_nobody(monkeypatch, caplog):
    """A queue that is full costs the oldest spans, and the end does not wait for the others."""
    monkeypatch.setattr(otlp, "_EXPORT_TIMEOUT_S", 600)
    monkeypatch.setattr(otlp, "_CLOSE_TIMEOUT_S", 0.2)
    for name, size in (("_QUEUE", 4), ("_BATCH", 2)):
        monkeypatch.setattr(otlp, name, size)
    with silent_server() as url:
        sink, ended = OtlpSpans(url, "uid", "mine"), threading.Event()
        monkeypatch.setattr(sink._queue, "shutdown", lambda: ended.wait(600))

        def run():
            for _ in range(20):
                sink.write("driver", [Span("sleep", 1, 2)])
            sink.close()
            ended.set()

        threading.Thread(target=run, daemon=True).start()
        assert ended.wait(120)
    late, last = warnings_of(caplog)
    assert late == f"--otlp-endpoint: {url}/v1/traces takes spans too slowly: some are lost"
    assert last == f"--otlp-endpoint: {url}/v1/traces: 20 of 20 spans were not delivered"
