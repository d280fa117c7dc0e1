"""What is written of a night."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import nightly
from benchmarks.nightly import NOT_RUN, PARTS, RESULTS, ROOT, Night, run_parts
from tests.page_runs import printed


def test_each_part_has_its_own_date_and_commit_and_one_that_was_not_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    monkeypatch.setattr(nightly, "PARTS", {"first": lambda night: found, "second": lambda night: ["x: no"]})
    results = tmp_path / "nightly.json"
    assert run_parts(["first"], Night(20, 12, 1), results)
    first = json.loads(results.read_text())["first"]
    assert json.loads(results.read_text())["second"] == NOT_RUN
    assert first["failed"] == [] and len(first["commit"].split()[0]) == 40 and first["date"].startswith("20")
    assert not run_parts(["second"], Night(20, 12, 1), results)
    told = json.loads(results.read_text())
    assert told["first"] == first and told["second"]["failed"] == ["x: no"]


def test_files_have_results_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CONTRIBUTING.md prints it, but for the files."""
    asked: list[Sequence[str]] = []
    monkeypatch.setattr(nightly, "long_forms", lambda night, files: asked.append(files) or [*files])
    results, night = tmp_path / "nightly.json", Night(20, 12, 1)
    (command,) = printed("python benchmarks/nightly.py")
    monkeypatch.setattr("sys.argv", [*command.words[1:-1], "tests/a.py", "tests/b.py"])
    monkeypatch.setattr(nightly, "RESULTS", results)
    with pytest.raises(SystemExit, match="True"):
        nightly.main()
    assert asked == [("tests/a.py",), ("tests/b.py",)]
    monkeypatch.setattr(nightly, "PARTS", {**PARTS, "flaky": lambda night: []})
    assert run_parts(["flaky"], night, results)
    told = json.loads(results.read_text())
    assert told["tests"] == NOT_RUN
    assert {file: row["failed"] for file, row in told["files"].items()} == {
        "tests/a.py": ["tests/a.py"],
        "tests/b.py": ["tests/b.py"],
    }


def test_the_checked_in_night_tells_of_each_part() -> None:
    told = json.loads(RESULTS.read_text())
    assert told.keys() == {*PARTS, "files"}
    rows = [part for name, part in told.items() if name != "files" and part != NOT_RUN]
    assert all({"date", "commit", "failed"} <= row.keys() for row in [*rows, *told["files"].values()])
    assert all((ROOT / file).is_file() for file in told["files"])
