"""The last lines of the logs of a test's processes, in its failure.

A log belongs to a test if something was written to it since the test began: below the directories of this
pytest process, or where engines and Ray's processes write theirs. Of Ray's and the fleet's, those of clusters
that another living process started are left out.
"""

import os
import re
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import psutil
import pytest

LINES, LOGS, _BYTES = 30, 12, 32_768
_SESSION = re.compile(r"session_[\d_-]+_(\d+)$")
_BEGAN = pytest.StashKey[float]()
_CLOCK_STEP = 0.05  # seconds by which the time of a file may lag behind the clock: the kernel's tick, or more


def last_lines(log: Path) -> str:
    with log.open("rb") as stream:
        stream.seek(max(stream.seek(0, os.SEEK_END) - _BYTES, 0))
        return "\n".join(stream.read().decode(errors="replace").splitlines()[-LINES:])


def _is_ours(session: Path) -> bool:
    """Whether this process or one below it started Ray's session, or one that has ended."""
    started_by = _SESSION.search(session.name)
    if started_by is None or not psutil.pid_exists(pid := int(started_by[1])):
        return True
    own = psutil.Process()
    return pid == own.pid or pid in {child.pid for child in own.children(recursive=True)}


def _places(basetemp: Path) -> Iterator[Path]:
    temporary = Path(tempfile.gettempdir())
    yield from basetemp.rglob("*.log")
    yield from temporary.glob("embedded_engine_*.log")
    for session in (temporary / f"slime-{os.getuid()}").glob("session_*"):
        yield from session.rglob("*.log") if _is_ours(session) else ()
    for session in (temporary / "ray").glob("session_2*"):
        if _is_ours(session):
            yield from session.glob("logs/worker-*.out")
            yield from session.glob("logs/worker-*.err")


def logs_since(began: float, basetemp: Path) -> list[Path]:
    """Logs that were written since then and hold something: those of tests of this process, then the others.

    Of each the one that was written last comes first; the others' may be of tests that ran side by side.
    """
    written = {}
    for log in _places(basetemp):
        try:
            status = log.stat()
        except FileNotFoundError:  # of a test of another process
            continue
        if status.st_mtime >= began and status.st_size and not log.is_symlink():
            written[log] = status.st_mtime
    return sorted(written, key=lambda log: (not log.is_relative_to(basetemp), -written[log]))[:LOGS]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[_BEGAN] = time.time() - _CLOCK_STEP
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        basetemp = item.session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        for log in logs_since(item.stash[_BEGAN], basetemp):
            report.sections.append((f"last lines of {log}", last_lines(log)))
    return report
