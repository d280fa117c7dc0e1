"""How long each file of tests took: recorded with ``--record-times FILE``, read for order and time left."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "benchmarks" / "results" / "suite_times.json"


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def recorded(path: Path = RECORDED) -> dict[str, tuple[float, int]]:
    """Seconds and number of tests by file, of an earlier run; empty without one."""
    if not path.exists():
        return {}
    files = json.loads(path.read_text())["files"]
    return {file: (seconds, tests) for file, (seconds, tests) in files.items()}


def seconds_of(
    counts: Mapping[str, int], records: Mapping[str, tuple[float, int]]
) -> dict[str, float | None]:
    """What so many tests of each file take by the records; None for an unknown file."""
    return {
        file: records[file][0] / max(records[file][1], 1) * count if file in records else None
        for file, count in counts.items()
    }


class Recorder:
    """Adds up what the tests of each file took, in whichever process they ran."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.seconds: Counter[str] = Counter()
        self.tests: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = file_of(report.nodeid)
        self.seconds[file] += report.duration  # type: ignore[assignment]
        self.tests[file] += report.when == "teardown"

    def pytest_sessionfinish(self) -> None:
        """Adds to what is in the file: a tier may be several runs."""
        if self._path is None:
            return
        files = recorded(self._path)
        for file, tests in self.tests.items():
            seconds, before = files.get(file, (0.0, 0))
            files[file] = (round(seconds + self.seconds[file], 2), before + tests)
        self._path.write_text(json.dumps({"files": files}) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        slowest = [(file, seconds) for file, seconds in self.seconds.most_common(10) if seconds >= 1]
        if len(slowest) > 1:
            terminalreporter.write_sep("=", "slowest files")
        for file, seconds in slowest if len(slowest) > 1 else []:
            terminalreporter.write_line(f"{seconds:.1f} s, {self.tests[file]} tests: {file}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-times", metavar="FILE", type=Path, help="add the seconds of each file of tests"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config.getoption("record_times")), "records")
