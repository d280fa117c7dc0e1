"""The newest metrics of a run, for Prometheus to ask for: ``http://127.0.0.1:<--prometheus-port>/metrics``.

Those of its engines and routers stand on the same page, and are fetched when it is asked for.
"""

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from numbers import Real
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from slime.observability.metrics_pages import MetricsPage, fetched, merged, sample, written
from slime.utils.quiet_server import QuietServer
from slime.utils.same_site import is_foreign

_HOST = "127.0.0.1"
_READ_TIMEOUT_S = 5.0
_OTHER_CHARACTERS = re.compile(r"[^a-zA-Z0-9_]")
_UP = "# HELP slime_up whether the metrics of an engine or a router could be had\n# TYPE slime_up gauge\n"

FindPages = Callable[[], Sequence[MetricsPage]]


class NewestMetrics(Collector):
    """The newest value of each metric, and the newest step of each axis.

    A metric is called ``slime_`` and its name with ``_`` for whatever Prometheus does not allow; the label
    ``metric`` has the name itself.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: dict[str, int] = {}
        self._values: dict[str, float] = {}

    def put(self, axis: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Takes a row; what is no number is left out."""
        with self._lock:
            self._steps[axis] = step
            self._values |= {name: float(value) for name, value in metrics.items() if isinstance(value, Real)}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        with self._lock:
            steps, values = dict(self._steps), dict(self._values)
        newest = GaugeMetricFamily("slime_step", "newest step of an axis", labels=["axis"])
        for axis, step in steps.items():
            newest.add_metric([axis], step)
        yield newest
        families: dict[str, GaugeMetricFamily] = {}
        for name, value in sorted(values.items()):
            allowed = f"slime_{_OTHER_CHARACTERS.sub('_', name)}"
            if allowed not in families:
                families[allowed] = GaugeMetricFamily(allowed, f"newest value of {name}", labels=["metric"])
            families[allowed].add_metric([name], value)
        yield from families.values()


class PrometheusSink:
    """Serves the newest row of each axis on loopback, and others' pages; one request after the other."""

    def __init__(self, port: int) -> None:
        """
        Raises:
            OSError: the port cannot be had.
        """
        self._newest, self._registry = NewestMetrics(), CollectorRegistry()
        self._registry.register(self._newest)
        ProcessCollector(registry=self._registry)
        self._others: tuple[FindPages, str | None] | None = None
        try:
            self._server = QuietServer((_HOST, port), _handler(self.page))
        except OSError as error:
            raise OSError(f"--prometheus-port {port}: {error.strerror} (wanted: a free port)") from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()

    def write(self, axis: str, step: int, metrics: Mapping[str, Any]) -> None:
        self._newest.put(axis, step, metrics)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @contextmanager
    def carrying(self, find: FindPages, api_key: str | None) -> Iterator[None]:
        """Has the page show those of other servers too, during the block.

        Args:
            find: says which there are; if it cannot, the page has none of them.
            api_key: that is shown to them.
        """
        self._others = find, api_key
        try:
            yield
        finally:
            self._others = None

    def page(self) -> bytes:
        """All that there is, within seconds."""
        own = generate_latest(self._registry).decode()
        pages, api_key = self._found()
        texts = fetched(pages, api_key) if pages else []
        up = [
            sample("slime_up", written({**page.labels, "url": page.url}), int(text is not None))
            for page, text in zip(pages, texts, strict=True)
        ]
        others = [(page.labels, text) for page, text in zip(pages, texts, strict=True) if text is not None]
        return merged(own + (_UP if up else "") + "".join(up), others).encode()

    def _found(self) -> tuple[Sequence[MetricsPage], str | None]:
        if self._others is None:
            return [], None
        find, api_key = self._others
        try:
            return find(), api_key
        except Exception:  # the rollout side is lost, or started again just now: the run's own affair
            return [], None


def _handler(page: Callable[[], bytes]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _READ_TIMEOUT_S  # others wait meanwhile

        def do_GET(self) -> None:
            headers = self.headers
            if is_foreign(headers.get("Host", ""), headers.get("Origin", ""), _HOST):
                self.send_error(403, "asked by a page of another site")
            elif self.path != "/metrics":
                self.send_error(404, "wanted /metrics")
            else:
                self._answer(page())

        def _answer(self, page: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE_LATEST)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing: it would stand between the lines of the run."""

    return Handler
