"""``from slime import train, RunConfig``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import slime
from slime import RunConfig, RunFailed, train
from slime.cli import api


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import slime, sys; print([name for name in sys.modules if name.startswith(('slime.', 'yaml'))])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout == "[]\n"
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = slime.trian


def test_flags_that_cannot_be_used_are_told_as_the_command_tells_them(tmp_path, capfd) -> None:
    (tmp_path / "run.yaml").write_text("rollout_batch_sise: 4\n")
    with pytest.raises(RunFailed) as raised:
        train(RunConfig(tmp_path / "run.yaml", lr="fast"))
    shown = capfd.readouterr().out
    assert raised.value.status == 2
    assert f"error: {tmp_path}/run.yaml:1: --rollout-batch-sise: unknown flag" in shown
    assert "flags.yaml:1: --lr: invalid float value: 'fast'" in shown
    assert str(raised.value) in shown


def test_a_run_that_ended_well_has_its_metrics(tmp_path, monkeypatch) -> None:
    """Of a run that somebody else has made: none is started here."""
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "resolved.yaml").write_text("lr: 1e-4\n")
    row = {"axis": "eval", "step": 4, "eval/held_out": 0.75}
    (directory / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    commands: list[list[str]] = []
    monkeypatch.setattr(api, "_run", commands.append)
    run = train(RunConfig(run_dir=directory, lr=1e-4, eval_prompt_data=("held_out", Path("e.jsonl"))))
    assert run.directory == directory and run.metrics()["eval"] == {4: {"eval/held_out": 0.75}}
    assert commands[0][1:4] == ["-m", "slime.cli", "train"]
