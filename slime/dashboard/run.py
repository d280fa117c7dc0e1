"""A run that is shown: its metrics, and what else it has written."""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slime.dashboard.books import COLUMNS, told_of
from slime.dashboard.engines import Engines
from slime.dashboard.metrics import MetricsFile
from slime.dashboard.recordings import Recordings
from slime.dashboard.trace import TraceFile
from slime.observability.alert import Alert

_ROWS = 20
_ENGINES = (
    *("fleet/.+", "perf/tokens_per_gpu_per_sec", "perf/effective_tokens_per_gpu_per_sec"),
    *("perf/request/queue_time/mean", "rollout/fully_async/(waiting|running)", "rollout/staleness/max"),
    *("rollout/fully_async/staleness/max", "rollout/prefix_cache_hit_rate", "rollout/spec_accept_length"),
    *("perf/update_weights_time", "perf/update_weights_pause_time"),
    *("perf/(.+/)?(critic-)?memory_(allocated|reserved)_gib", "perf/(.+/)?actor_train_mfu"),
)
_LEDGER = (
    *("rollout/dropped/.+", "rollout/dynamic_filter/drop_.+", "rollout/given_up", "rollout/ungraded_count"),
    *("rollout/fully_async/(resumed|regenerated)", "rollout/recomputed_tokens", "perf/failed_saves"),
)
_TABLES = {
    title: tuple(re.compile(name) for name in names)
    for title, names in (("engines", _ENGINES), ("ledger", _LEDGER))
}
"""Metrics of each table, in the order of its columns."""


@dataclass
class Run:
    """A run that is shown.

    Attributes:
        name: unlike those of the others.
        path: its file of metrics, which need not be there yet.
        max_staleness: its bound, if it has one.
    """

    name: str
    path: Path
    max_staleness: int | None = None
    recordings: Recordings = field(default_factory=Recordings)
    trace: TraceFile = field(default_factory=TraceFile)
    engines: Engines = field(default_factory=Engines)
    metrics: MetricsFile = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = MetricsFile(self.path, self.max_staleness)

    def summary(self, seconds: float) -> dict[str, Any]:
        """Returns what is known after these seconds; ``problem`` is why there is nothing, or nothing new."""
        problem = self._try(lambda: self.metrics.refresh(seconds))
        problem = problem or self._try(lambda: self.trace.refresh(seconds))
        of_trace = self.trace.alerts()
        in_trace = {alert.rule for alert in of_trace}
        of_metrics = [alert for alert in self.metrics.alerts() if alert.rule not in in_trace]
        alerts = [_told(alert) for alert in (*of_trace, *of_metrics)]
        alerts.sort(key=lambda alert: alert["is_over"])
        found = self.metrics.summary()
        read = min(found["read"], self.trace.steps()["read"])
        return {"name": self.name, "problem": problem, "alerts": alerts, **found, "read": read}

    def _try(self, read: Callable[[], None]) -> str | None:
        try:
            read()
        except FileNotFoundError:
            return f"{self.path}: not there yet"
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"{error}"
        return None

    def tables(self) -> dict[str, Any]:
        """Returns what the last steps say of engines, and of groups that were not trained."""
        return {title: self.metrics.table(names, _ROWS) for title, names in _TABLES.items()}

    def ledger(self) -> dict[str, Any]:
        """Returns the books on groups of samples, after each rollout."""
        return told_of(self.metrics.columns(COLUMNS), _ROWS)


def _told(alert: Alert) -> dict[str, Any]:
    return {**asdict(alert), "when": alert.when}
