"""``slime train`` and ``slime check`` take the flags of ``train.py`` and ``train_async.py``."""

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
    assert started == [(loop.train, loop.refusal, loop.notes, ["--lr", "1e-4", "--fp32"])]


def test_check_is_a_run_that_is_not_started(started) -> None:
    assert main(["check", "--async", "--fp32"]) == 0
    assert started == [(asynchronous.train, asynchronous.refusal, asynchronous.notes, ["--fp32", "--check"])]


def test_a_wrong_flag_is_told_as_train_py_tells_it(capsys) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["train", "--rollout-batch-sise", "4"])
    assert ending.value.code == 2
    assert (
        "--rollout-batch-sise: unknown flag (did you mean --rollout-batch-size?)" in capsys.readouterr().err
    )
