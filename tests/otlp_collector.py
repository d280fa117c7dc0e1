"""A collector of spans: takes OTLP over HTTP, and keeps what it was sent.

with Collector() as collector:
    run(otlp_endpoint=collector.url)
spans = collector.spans
"""

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Received:
    """A span as it came."""

    name: str
    process: str
    trace: bytes
    id: bytes
    parent: bytes
    start: float
    end: float
    attrs: dict[str, Any]
    resource: dict[str, Any]
    error: str | None


class Collector:
    """Serves on loopback until the block ends.

    Attributes:
        status: of its answers.
        headers: of each request, in small letters.
        requests: bodies, by path.
    """

    def __init__(self, port: int = 0) -> None:
        self.status, self.headers = 200, list[dict[str, str]]()
        self.requests: list[tuple[str, ExportTraceServiceRequest]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 60

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.headers.append({name.lower(): value for name, value in self.headers.items()})
                collector.requests.append((self.path, ExportTraceServiceRequest.FromString(body)))
                self.send_response(collector.status)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def spans(self) -> list[Received]:
        """All spans so far."""
        return [
            _received(span, _plain(of_process.resource.attributes))
            for _, request in list(self.requests)
            for of_process in request.resource_spans
            for scope in of_process.scope_spans
            for span in scope.spans
        ]


def _received(span: Any, resource: dict[str, Any]) -> Received:
    times = span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9
    ids = span.trace_id, span.span_id, span.parent_span_id
    error = span.status.message if span.status.code == 2 else None
    return Received(
        span.name, resource["slime_process"], *ids, *times, _plain(span.attributes), resource, error
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}
