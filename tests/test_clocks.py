"""Nothing waits by a clock that somebody may set: it jumps, and those that count from the start do not."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_WALL_CLOCK = re.compile(r"\btime\.time(_ns)?\b|\bdatetime\.(utc)?now\b|\bfrom time import [^\n]*\btime\b")
_STAMP, _ANSWER = "a stamp for people, beside durations of its own", "a field of answers"
_SINCE = "since when an engine is what it is, for people"
READS_IT = {
    "slime/agent/adapters/openai.py": _ANSWER,
    "slime/agent/adapters/responses.py": _ANSWER,
    "slime/backends/embedded_engine/http/dialects.py": _ANSWER,
    "slime/backends/embedded_engine/http/info_routes.py": _ANSWER,
    "slime/backends/embedded_engine/http/responses.py": _ANSWER,
    "slime/backends/embedded_engine/http/state.py": _ANSWER,
    "slime/cli/engines.py": _SINCE,
    "slime/dashboard/engines.py": _SINCE,
    "slime/observability/jsonl.py": _STAMP,
    "slime/observability/memory_history.py": "the name of a file",
    "slime/observability/otlp.py": _STAMP,
    "slime/observability/phases.py": "what a console shows",
    "slime/observability/run_log.py": _STAMP,
    "slime/observability/spans.py": "spans of several processes lie beside one another",
    "slime/observability/startup.py": _STAMP,
    "slime/observability/trace_utils.py": _STAMP,
    "slime/processes/abandoned.py": "directories that somebody has just made",
    "slime/processes/private.py": "files that are days old",
    "slime/ray/engine_place.py": _SINCE,
    "slime/ray/engine_record.py": _SINCE,
    "slime/utils/external_utils/command_utils.py": "the name of a directory",
    "slime_plugins/rollout_buffer/pool.py": "leases that a file keeps over restarts",
    "slime_plugins/rollout_buffer/store.py": "leases that a file keeps over restarts",
}
"""Whoever reads it, and what for."""


def test_nobody_reads_a_clock_that_jumps_but_for_what_is_named():
    found = {
        str(path.relative_to(ROOT))
        for package in ("slime", "slime_plugins")
        for path in (ROOT / package).rglob("*.py")
        if _WALL_CLOCK.search(path.read_text())
    }
    assert found == READS_IT.keys()


@pytest.mark.parametrize(
    "line",
    [
        "now = time.time()",
        "clock=time.time",
        "time.time_ns()",
        "datetime.now(UTC)",
        "from time import sleep, time",
    ],
)
def test_such_a_clock_is_found(line):
    assert _WALL_CLOCK.search(line)


@pytest.mark.parametrize("line", ["time.monotonic()", "from time import monotonic", "self.time = now"])
def test_others_are_none(line):
    assert not _WALL_CLOCK.search(line)
