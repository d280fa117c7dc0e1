"""Spans of all processes of a run, sent to an OpenTelemetry collector over HTTP (``--otlp-endpoint``).

The driver sends them, in a thread: neither a slow collector nor one that is gone delays the run. Each part of
the run (`PARTS`), a step among them, is a trace of its own, whose root is the driver's span of it; it holds
what began while it lasted. Certificates and headers, keys among them, come from the environment variables
that OpenTelemetry has for them (``OTEL_EXPORTER_OTLP_HEADERS`` and others).
"""

import logging
import os
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from slime.observability.spans import DRIVER, PARTS, Span

logger = logging.getLogger(__name__)

_PATH = "/v1/traces"
_START_TIMEOUT_S = 5.0  # for the first answer, with all that is tried again
_EXPORT_TIMEOUT_S = 10.0  # of one batch, likewise
_CLOSE_TIMEOUT_S = 10.0  # for what is waiting at the end of a run
_DELAY_MS = 1000.0  # that a span may wait for others
_QUEUE = 2**17  # spans that wait; a rollout comes with those of all its samples at once
_BATCH = 1024
_KEPT_PARTS = 1024
_LARGEST = 2**63  # of an integer in a span
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope("slime")


class CollectorError(RuntimeError):
    """The collector does not take spans; it says which one, and why."""


def require_collector(endpoint: str) -> None:
    """Sends no spans, in the format for them.

    Raises:
        CollectorError: the collector does not take that.
    """
    exporter = _Exporter(endpoint, _START_TIMEOUT_S)
    try:
        if exporter.export([]) is not SpanExportResult.SUCCESS:
            raise CollectorError(
                f"--otlp-endpoint {endpoint}: {exporter.url}: {exporter.reason} "
                "(wanted: a collector that takes spans over HTTP)"
            )
    finally:
        exporter.shutdown()


@dataclass(frozen=True)
class _Part:
    """A part of the run that has begun: since when, and the root of its trace."""

    began: float
    root: SpanContext


class OtlpSpans:
    """Sends spans to a collector. What is lost is told when that begins, and at the end.

    Args:
        run: an id that no other run has.
        name: of the run, for people.
    """

    def __init__(self, endpoint: str, run: str, name: str) -> None:
        service = os.environ.get("OTEL_SERVICE_NAME", "slime")
        self._run, self._resources = run, dict[str, Resource]()
        self._resource = Resource.create({"service.name": service, "slime_run": name})
        self._parts = deque([_Part(time.time(), _context())], _KEPT_PARTS)
        self._exporter, self._given, self._is_late = _Exporter(endpoint, _EXPORT_TIMEOUT_S), 0, False
        self._queue = BatchSpanProcessor(
            self._exporter,
            max_queue_size=_QUEUE,
            schedule_delay_millis=_DELAY_MS,
            max_export_batch_size=_BATCH,
        )

    def write(self, process: str, spans: Iterable[Span]) -> None:
        """Has the spans of a process sent, each below the one that it lies within."""
        resource, contexts = self._resource_of(process), dict[int, SpanContext]()
        for span, outer in nested(spans):
            ends_part = process == DRIVER and span.name in PARTS
            if ends_part:
                parent, own = None, self._parts[-1].root
                self._parts.append(_Part(span.end, _context()))
            else:
                parent = self._part_at(span.start).root if outer is None else contexts[id(outer)]
                own = _context(parent.trace_id)
            contexts[id(span)] = own
            self._given += 1
            self._queue.on_end(_readable(span, own, parent, resource))
        if self._given - self._exporter.settled > _QUEUE and not self._is_late:
            self._is_late = True
            logger.warning("--otlp-endpoint: %s takes spans too slowly: some are lost", self._exporter.url)

    def close(self) -> None:
        """Sends what is waiting, for some seconds at most."""
        ending = threading.Thread(target=self._queue.shutdown, name="otlp-end", daemon=True)
        ending.start()
        ending.join(_CLOSE_TIMEOUT_S)
        lost, where = self._given - self._exporter.delivered, f"--otlp-endpoint: {self._exporter.url}"
        if lost:
            logger.warning("%s: %d of %d spans were not delivered", where, lost, self._given)

    def _part_at(self, moment: float) -> _Part:
        return next((part for part in reversed(self._parts) if part.began <= moment), self._parts[0])

    def _resource_of(self, process: str) -> Resource:
        if process not in self._resources:
            own = {"service.instance.id": f"{self._run}/{process}", "slime_process": process}
            self._resources[process] = self._resource.merge(Resource(own))
        return self._resources[process]


def nested(spans: Iterable[Span]) -> Iterator[tuple[Span, Span | None]]:
    """Yields spans of a process, each after the one that it lies within: of its lane, else of lane 0."""
    lanes: dict[int, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: (span.start, -span.end, span.lane)):
        outer = None
        for lane in dict.fromkeys((span.lane, 0)):
            begun = lanes[lane]
            while begun and begun[-1].end <= span.start:
                begun.pop()
            outer = outer or next((other for other in reversed(begun) if other.end >= span.end), None)
        yield span, outer
        lanes[span.lane].append(span)


def _context(trace_id: int | None = None) -> SpanContext:
    """A new span's: of a trace, or of a new one. No seed of the run's decides it."""
    trace_id = trace_id or secrets.randbits(128) or 1
    return SpanContext(trace_id, secrets.randbits(64) or 1, is_remote=False, trace_flags=_SAMPLED)


def _readable(span: Span, own: SpanContext, parent: SpanContext | None, resource: Resource) -> ReadableSpan:
    error = span.attrs.get("error")
    return ReadableSpan(
        _text(span.name),
        own,
        parent,
        resource,
        _attributes(span.attrs),
        status=Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, _text(error)),
        start_time=int(span.start * 1e9),
        end_time=int(span.end * 1e9),
        instrumentation_scope=_SCOPE,
    )


def _attributes(attrs: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Values of the kinds that the format has; one that it cannot hold would cost the batch."""
    return {_text(name): _plain(value) for name, value in attrs.items() if value is not None}


def _plain(value: Any) -> bool | int | float | str:
    if isinstance(value, bool | float) or (isinstance(value, int) and -_LARGEST <= value < _LARGEST):
        return value
    return _text(value)


def _text(value: object) -> str:
    return str(value).encode("utf-8", "replace").decode()


class _Exporter(SpanExporter):
    """OpenTelemetry's own, which says nothing by itself, and counts.

    Attributes:
        settled: spans that are delivered or given up.
    """

    def __init__(self, endpoint: str, timeout: float) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it would print headers, too
        base = endpoint.rstrip("/")
        self.url = base if base.endswith(_PATH) else base + _PATH
        self._session, self._has_told = _Session(), False
        self._real = OTLPSpanExporter(self.url, timeout=timeout, session=self._session)
        self.settled = self.delivered = 0

    @property
    def reason(self) -> str:
        """Why the last request failed; empty if it did not."""
        return self._session.reason

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._real.export(spans)
        if self.reason:  # it takes a redirection for success
            result = SpanExportResult.FAILURE
        self.settled += len(spans)
        if result is SpanExportResult.SUCCESS:
            self.delivered += len(spans)
        elif spans and not self._has_told:
            self._has_told = True
            where, why = f"--otlp-endpoint: {self.url}", self.reason or "the batch cannot be sent"
            logger.warning("%s: spans are lost, the run goes on: %s", where, why)
        return result

    def shutdown(self) -> None:
        self._real.shutdown()


class _Session(requests.Session):
    """Keeps why its last request failed."""

    reason = ""

    def request(self, *arguments: Any, **options: Any) -> requests.Response:
        try:
            answer = super().request(*arguments, **options)
        except requests.exceptions.InvalidHeader:  # which it would quote
            self.reason = "OTEL_EXPORTER_OTLP_HEADERS: holds what no header can"
            raise
        except Exception as error:
            self.reason = _innermost(error)
            raise
        self.reason = "" if answer.status_code // 100 == 2 else f"HTTP {answer.status_code} {answer.reason}"
        return answer


def _innermost(error: BaseException) -> str:
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return f"{type(error).__name__}: {error}"
