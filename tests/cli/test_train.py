"""``slime train`` and ``slime check`` take the flags of ``train.py`` and ``train_async.py``."""

import os
import sys

import pytest

from slime.cli.main import main
from slime.ray import asynchronous, session, synchronous


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    calls: list[tuple] = []
    monkeypatch.setattr(session, "main", lambda *call: calls.append(call))
    return calls


@pytest.mark.parametrize(("words", "loop"), [([], synchronous), (["--async"], asynchronous)])
def test_the_flag_chooses_the_loop(words, loop, started) -> None:
    assert main(["train", "--lr", "1e-4", *words, "--fp32"]) == 0
    assert started == [(loop.train, loop.refusal, loop.notes, ["--lr", "1e-4", *words, "--fp32"])]


def test_a_file_chooses_the_loop_too(started, tmp_path) -> None:
    (tmp_path / "run.yaml").write_text("async: true\n")
    assert main(["train", "--config", str(tmp_path / "run.yaml")]) == 0
    assert started[0][0] is asynchronous.train


def test_modules_of_the_working_directory_are_found_after_all_others(started, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    assert main(["train"]) == 0
    assert sys.path[-1] == str(tmp_path) and os.environ["PYTHONPATH"] == f"/elsewhere:{tmp_path}"


def test_check_is_a_run_that_is_not_started(started) -> None:
    assert main(["check", "--async", "--fp32"]) == 0
    words = ["--async", "--fp32", "--check"]
    assert started == [(asynchronous.train, asynchronous.refusal, asynchronous.notes, words)]


def test_the_file_for_a_command_line_is_printed(started, capsys) -> None:
    needed = ["--hf-checkpoint", "m", "--rollout-batch-size", "4"]
    assert main(["check", "--write-config", *needed, "--lr", "4e-4"]) == 0
    assert "  lr: 0.0004\n" in capsys.readouterr().out and started == []
    assert main(["check", "--write-config", *needed, "--lr", "fast"]) == 2
    assert capsys.readouterr().err == "error: --lr: invalid float value: 'fast'\n"


def test_a_wrong_flag_is_told_as_train_py_tells_it(capsys) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["train", "--rollout-batch-sise", "4"])
    assert ending.value.code == 2
    assert (
        "--rollout-batch-sise: unknown flag (did you mean --rollout-batch-size?)" in capsys.readouterr().err
    )
