"""Whole runs are written and compared as CONTRIBUTING.md prints."""

import json
from pathlib import Path

import pytest

from tests.golden import runs
from tests.page_runs import printed


def test_runs_are_compared_as_printed(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (command,) = printed("python -m tests.golden.runs --compare")
    row = {"metrics": {"train 0": {"train/loss": 0.5}}, "samples": {"0": "digest"}}
    for side in command.words[4:]:
        Path(side).mkdir()
        Path(side, "sft.json").write_text(json.dumps(row))
    assert _status(command.words[3:]) == 0
    row["metrics"]["train 0"]["train/loss"] = 0.25
    Path("AFTER/sft.json").write_text(json.dumps(row))
    capsys.readouterr()
    assert _status(command.words[3:]) == 1
    assert "sft.json: metrics train 0" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.e2e
@pytest.mark.timeout(1800)
def test_every_run_of_the_table_is_written_as_printed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (command,) = (c for c in printed("python -m tests.golden.runs") if "--compare" not in c.words)
    runs.main(command.words[3:])
    written = [json.loads(file.read_text()) for file in Path(command.words[3]).glob("*.json")]
    assert len(written) == len(runs.RUNS)
    assert all(result["metrics"] and result["samples"] for result in written)


def _status(words: tuple[str, ...]) -> int:
    with pytest.raises(SystemExit) as end:
        runs.main(words)
    return int(end.value.code or 0)
