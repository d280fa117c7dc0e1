"""One line that says how far the tests are, in place of a dot for each of them.

A terminal shows it all the time. Elsewhere it is printed every ``EVERY_S`` seconds, so that a log grows by
little and shows what is going on. ``-v`` and ``-q`` leave pytest's own output as it is.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from tests.plugins.records import file_of, recorded, seconds_of

EVERY_S = 15.0
_TERMINAL_EVERY_S = 0.2


class Estimate:
    """The time left, by the seconds that each file took once, or by the number of tests.

    Args:
        tests: how many each file has.
        records: seconds and number of tests by file.
        workers: how many files run at a time.
    """

    def __init__(self, tests: Counter[str], records: dict[str, tuple[float, int]], workers: int = 1) -> None:
        known = {file: seconds for file, seconds in seconds_of(tests, records).items() if seconds is not None}
        each = sum(known.values()) / (sum(tests[file] for file in known) or 1) or 1.0
        self._each = {file: known.get(file, each * count) / count for file, count in tests.items()}
        self._left, self._workers = Counter(tests), workers
        self._all = self._work()

    def done(self, file: str) -> None:
        self._left[file] -= 1

    def left(self, elapsed: float) -> float:
        """Seconds, if the rest goes on at the pace so far; a file is not divided among workers."""
        rest, longest = self._work(), max((self._seconds(file) for file in self._left), default=0.0)
        pace = elapsed * self._workers / max(self._all - rest, 1e-9)
        return max(rest / self._workers, longest) * pace

    def _seconds(self, file: str) -> float:
        return self._left[file] * self._each[file]

    def _work(self) -> float:
        return sum(self._seconds(file) for file in self._left)


class Progress:
    """Counts tests that ended, and writes the line when it is time to."""

    def __init__(
        self, reporter: pytest.TerminalReporter, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._reporter, self._clock = reporter, clock
        self._tty = reporter.isatty
        self._every = _TERMINAL_EVERY_S if self._tty else EVERY_S
        self._start = self._written = clock()
        self._tests: Counter[str] = Counter()
        self._done = self._failed = 0
        self._estimate: Estimate | None = None

    def begin(self, nodeids: Iterable[str], workers: int) -> None:
        self._tests = Counter(map(file_of, nodeids))
        self._estimate = Estimate(self._tests, recorded(), workers)
        self._start = self._written = self._clock()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self.begin([item.nodeid for item in session.items], 1)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        if self._estimate is None:  # every worker collects the same
            self.begin(ids, node.workerinput["workercount"])  # type: ignore[attr-defined]

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No letters."""
        if hasattr(report, "wasxfail"):
            return None
        if report.failed:
            return ("failed", "", "FAILED") if report.when == "call" else ("error", "", "ERROR")
        if report.skipped:
            return "skipped", "", "SKIPPED"
        return ("passed", "", "PASSED") if report.when == "call" else None

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        ended = report.when not in ("setup", "call")  # the report of a worker that died has another
        self._done += ended
        self._failed += report.failed
        if ended and self._estimate is not None:
            self._estimate.done(file_of(report.nodeid))
        if report.failed:
            self._write(f"FAILED {report.nodeid}", stays=True)
        if self._clock() - self._written >= self._every or report.failed:
            self._written = self._clock()
            self._write(self.line())

    def line(self) -> str:
        elapsed = self._clock() - self._start
        left = self._estimate.left(elapsed) if self._estimate and self._done else None
        rest = "" if left is None else f", about {minutes(left)} left"
        total = sum(self._tests.values())
        return f"{self._done} of {total} tests, {self._failed} failed, {minutes(elapsed)}{rest}"

    def _write(self, line: str, stays: bool = False) -> None:
        if self._tty:
            self._reporter.rewrite(line, erase=True)
        if stays or not self._tty:
            self._reporter.write_line("" if self._tty else line)


def minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


@pytest.hookimpl(trylast=True)  # after the reporter is there
def pytest_configure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and config.get_verbosity() == 0 and not hasattr(config, "workerinput"):
        reporter.showfspath = False
        config.pluginmanager.register(Progress(reporter), "progress")
