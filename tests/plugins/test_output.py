"""What a run says of itself: how far it is, what was slow, and the logs of what failed."""

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.forking import ForkedScript
from tests.plugins.logs import logs_since
from tests.plugins.order import longest_first, unit_of
from tests.plugins.progress import EVERY_S, Estimate, Progress
from tests.plugins.records import recorded, seconds_of

PLUGINS = [
    word for name in ("records", "logs", "order", "progress") for word in ("-p", f"tests.plugins.{name}")
]
FAILING = """
import time

def test_an_engine_dies(tmp_path):
    (tmp_path / "engine.log").write_text("".join(f"line {n}\\n" for n in range(40)))
    time.sleep(1.1)
    assert False, "no answer"
"""
PASSING = """
import time

def test_the_log_of_another_test(tmp_path):
    (tmp_path / "router.log").write_text("all is well\\n")

def test_slow():
    time.sleep(1.1)
"""


@pytest.mark.parametrize("workers", [[], ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]])
def test_a_run_says_what_failed_with_the_end_of_its_logs_and_what_was_slow(
    tmp_path: Path, workers: list[str]
) -> None:
    (tmp_path / "test_a.py").write_text(PASSING)
    (tmp_path / "test_b.py").write_text(FAILING)
    # Else it would show logs of the tests that run beside this one.
    (tmp_path / "conftest.py").write_text(f"import tempfile\ntempfile.tempdir = {str(tmp_path)!r}\n")
    times, log = tmp_path / "times.json", tmp_path / "out"
    words = [*PLUGINS, "--record-times", str(times), "--rootdir", str(tmp_path), *workers]
    words += ["--basetemp", str(tmp_path / "temporary"), str(tmp_path)]
    assert ForkedScript("pytest", words, log, cwd=tmp_path).wait(600) == 1
    output = log.read_text()
    assert output.count("\nFAILED test_b.py::test_an_engine_dies\n") == 1
    assert " of 3 tests, 1 failed, 0:" in output
    assert "line 10\n" in output and "line 39\n" in output and "line 9\n" not in output
    assert "all is well" not in output
    assert "1 tests: test_b.py" in output and "2 tests: test_a.py" in output
    files = recorded(times)
    assert {file: tests for file, (_, tests) in files.items()} == {"test_a.py": 2, "test_b.py": 1}
    assert all(seconds > 1 for seconds, _ in files.values())


class Reporter:
    """A terminal, or a file, that keeps what is written."""

    def __init__(self, isatty: bool) -> None:
        self.isatty, self.lines = isatty, list[str]()

    def write_line(self, line: str) -> None:
        self.lines.append(line)

    rewrite = lambda self, line, erase: self.lines.append(line)


def finished(nodeid: str) -> pytest.TestReport:
    return pytest.TestReport(nodeid, (nodeid, None, ""), {}, "passed", None, "teardown")


def test_a_file_gets_a_line_in_a_while_and_a_terminal_gets_it_at_once() -> None:
    now = [0.0]
    for isatty, expected in ((False, 3), (True, 9)):
        reporter = Reporter(isatty)
        progress = Progress(reporter, lambda: now[0])  # type: ignore[arg-type]
        progress.begin([f"unknown.py::test_{n}" for n in range(10)], 1)
        for n in range(9):
            now[0] += EVERY_S / 3
            progress.pytest_runtest_logreport(finished(f"unknown.py::test_{n}"))
        assert len(reporter.lines) == expected
        assert reporter.lines[-1] == "9 of 10 tests, 0 failed, 0:45, about 0:05 left"


def test_the_time_left_is_that_of_the_files_that_are_left() -> None:
    records = {"long.py": (90.0, 1), "short.py": (10.0, 10)}
    estimate = Estimate(Counter({"long.py": 1, "short.py": 10}), records)
    for _ in range(10):
        estimate.done("short.py")
    assert estimate.left(elapsed=20.0) == pytest.approx(180.0)  # at half the speed of the record


def test_a_file_is_not_divided_among_workers() -> None:
    records = {"long.py": (80.0, 1), "short.py": (20.0, 2)}
    estimate = Estimate(Counter({"long.py": 1, "short.py": 2}), records, workers=2)
    estimate.done("short.py")
    assert estimate.left(elapsed=5.0) == pytest.approx(80.0)


def test_the_longest_file_begins_first_after_those_that_nobody_knows() -> None:
    files = Counter({"short.py": 5, "long.py": 1, "cut.py": 1, "new.py": 1})
    records = {"short.py": (5.0, 5), "long.py": (60.0, 1), "cut.py": (100.0, 100)}
    assert seconds_of(files, records)["cut.py"] == 1.0
    assert longest_first(files, records) == ["new.py", "long.py", "short.py", "cut.py"]


def test_whole_runs_begin_together_where_one_of_them_is_long() -> None:
    records = {"e2e/test_a.py": (40.0, 1), "e2e/test_b.py": (50.0, 1), "long.py": (60.0, 1)}
    found = longest_first(Counter(dict.fromkeys(records, 1)), records)
    clusters = {unit_of("e2e/test_a.py"), unit_of("e2e/test_b.py")}
    runs = ["e2e/test_b.py", "e2e/test_a.py"]
    assert found == ([*runs, "long.py"] if len(clusters) == 1 else ["long.py", *runs])
    assert len({unit_of(f"e2e/test_{name}.py", clusters=2) for name in range(20)}) == 2


RUN = """
def test_a_run(cluster): pass

def test_another_run(cluster): pass
"""
CLUSTER = """
import pytest

@pytest.fixture(scope="package")
def cluster(pytestconfig):
    with (pytestconfig.rootpath / "said").open("a") as said:
        said.write("up\\n")
    yield
    with (pytestconfig.rootpath / "said").open("a") as said:
        said.write("down\\n")
"""


def test_whole_runs_of_several_files_share_a_cluster_though_others_run_beside_them(tmp_path: Path) -> None:
    (tmp_path / "e2e").mkdir()
    (tmp_path / "e2e/__init__.py").touch()
    (tmp_path / "e2e/conftest.py").write_text(CLUSTER)
    for name in ("e2e/test_a.py", "test_b.py", "e2e/test_c.py", "test_d.py", "e2e/test_e.py"):
        code = RUN if name.startswith("e2e") else RUN.replace("(cluster)", "()")
        (tmp_path / name).write_text(code)
    words = [*PLUGINS, "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--rootdir", str(tmp_path)]
    log = tmp_path / "out"
    assert ForkedScript("pytest", [*words, str(tmp_path)], log, cwd=tmp_path).wait(600) == 0, log.read_text()
    clusters = {unit_of(f"e2e/test_{name}.py") for name in "ace"}
    assert Counter((tmp_path / "said").read_text().split()) == {"up": len(clusters), "down": len(clusters)}


def test_logs_that_were_not_written_during_a_test_are_not_shown(tmp_path: Path) -> None:
    old, new, empty = (tmp_path / f"{name}.log" for name in ("old", "new", "empty"))
    old.write_text("old")
    new.write_text("new")
    empty.touch()
    began = new.stat().st_mtime
    os.utime(old, (began - 10, began - 10))
    found = logs_since(began, tmp_path)
    assert new in found and not {old, empty} & {*found}
