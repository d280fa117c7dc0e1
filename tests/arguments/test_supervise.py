"""What `--supervise` starts, and what it refuses."""

import os
import sys
from itertools import chain

import pytest
import yaml

from slime.arguments import UsageError, validated_args
from slime.cli import supervision
from slime.cli.main import main

GOING_ON = ["--save", "out", "--load", "out", "--save-interval", "1"]


@pytest.fixture
def restarts(monkeypatch, tmp_path):
    """The commands that are supervised, instead of their run."""
    calls = []

    class Restarts:
        def __init__(self, *call):
            calls.append(call)

        def run(self):
            return 7

    monkeypatch.setattr(supervision, "Restarts", Restarts)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.chdir(tmp_path)
    return calls


def test_the_same_command_is_started_in_another_process(restarts, words, tmp_path):
    line = [*words(), *GOING_ON, "--supervise", "--max-restarts", "3"]
    assert main(["train", *line]) == 7
    ((command, environment, progress, limit),) = restarts
    assert command == [sys.executable, "-m", "slime.cli", "train", *line]
    assert environment["SLIME_SUPERVISED"] == str(os.getpid()) and limit == 3
    before = progress()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/latest_checkpointed_iteration.txt").write_text("0")
    assert progress() != before


def test_what_was_started_has_no_supervisor_of_its_own(restarts, words, monkeypatch):
    monkeypatch.setenv("SLIME_SUPERVISED", "1")
    assert not supervision.wants_supervisor([*words(), *GOING_ON, "--supervise"])


@pytest.mark.parametrize("flag", [["--ckpt-step", "3"], ["--start-rollout-id=0"], ["--finetune"]])
def test_what_would_begin_anew_each_time_is_refused(restarts, words, flag, capsys):
    assert main(["train", "--supervise", *words(), *GOING_ON, *flag]) == 2
    assert capsys.readouterr().err.startswith(
        f"error: {flag[0].partition('=')[0]}: would begin there after each"
    )
    assert restarts == []


@pytest.mark.parametrize("flag", ["--no-load-optim", "--no-save-optim"])
def test_a_start_that_would_not_have_the_optimizer_of_the_one_before_is_refused(
    restarts, words, flag, capsys
):
    assert main(["train", "--supervise", *words(), *GOING_ON, flag]) == 2
    assert capsys.readouterr().err.startswith(f"error: {flag}: under --supervise no start would have")
    assert main(["train", "--supervise", *words(), *GOING_ON, "--no-load-optim", "--no-save-optim"]) == 7


def test_users_code_is_not_imported(restarts, words, tmp_path, monkeypatch):
    (tmp_path / "of_a_user.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    line = [*words(), *GOING_ON, "--supervise", "--custom-rm-path", "of_a_user.reward"]
    assert main(["train", *line]) == 7


def test_a_check_is_not_supervised(words):
    assert not supervision.wants_supervisor([*words(), *GOING_ON, "--supervise", "--check"])


def test_a_checkpoint_of_the_same_iteration_is_a_new_one(restarts, words, tmp_path):
    main(["train", *words(), *GOING_ON, "--supervise"])
    ((_, _, progress, _),) = restarts
    marker = tmp_path / "out/latest_checkpointed_iteration.txt"
    marker.parent.mkdir()
    marker.write_text("3")
    os.utime(marker, (1, 1))
    before = progress()
    marker.write_text("3")
    assert progress() != before


def test_mistakes_are_left_to_the_run(restarts, words):
    assert supervision.supervise([*words(), *GOING_ON, "--lr", "fast"]) is None


@pytest.mark.parametrize("missing", range(3))
def test_a_run_that_cannot_go_on_is_refused(words, missing, monkeypatch):
    monkeypatch.setenv("SLIME_SUPERVISED", "1")
    flags = [["--save", "out"], ["--load", "out"], ["--save-interval", "1"]]
    line = [*words(), "--supervise", *chain(*flags[:missing], *flags[missing + 1 :])]
    with pytest.raises(UsageError, match="--supervise: found --save"):
        validated_args(line)


def test_a_program_that_starts_nothing_again_refuses_it(words):
    with pytest.raises(UsageError, match="wanted: slime train --supervise"):
        validated_args([*words(), *GOING_ON, "--supervise"])
    validated_args([*words(), *GOING_ON, "--supervise", "--check"])


def test_a_run_of_several_policies_goes_on_where_the_first_one_saves(restarts, words, tmp_path):
    first = {"name": "a", "save": "out", "load": "out"}
    (tmp_path / "policies.yaml").write_text(yaml.safe_dump({"policies": [first, {"name": "b"}]}))
    assert (
        main(["train", *words(), "--policies", "policies.yaml", "--save-interval", "1", "--supervise"]) == 7
    )
    progress = restarts[0][2]
    before = progress()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/latest_checkpointed_iteration.txt").write_text("0")
    assert progress() != before


def test_a_policy_that_would_begin_anew_each_time_is_refused(restarts, words, tmp_path, capsys):
    policies = [{"name": "a"}, {"name": "b", "finetune": True}]
    (tmp_path / "policies.yaml").write_text(yaml.safe_dump({"policies": policies}))
    assert main(["train", *words(), *GOING_ON, "--policies", "policies.yaml", "--supervise"]) == 2
    assert "policies.yaml: b: --finetune: would begin there after each" in capsys.readouterr().err
    assert restarts == []
