"""What ``report``, ``resume`` and ``diff`` read of a run's directory."""

import json
from pathlib import Path

import pytest

from slime.arguments.config_record import write_record
from slime.cli.main import main
from slime.cli.report import duration, sparkline
from slime.ray import asynchronous, session
from tests.page_runs import printed

WORDS = ["--hf-checkpoint", "m", "--rollout-batch-size", "4", "--wandb-key", "s3cr3t"]


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a directory as a run leaves it."""
    monkeypatch.chdir(tmp_path)

    def make(name: str, *words: str) -> str:
        write_record(tmp_path / name, [*WORDS, "--run-dir", name, *words])
        rows = [
            *(
                {"axis": "rollout", "step": i, "rollout/raw_reward": i / 4, "perf/step_time": 20}
                for i in range(4)
            ),
            *({"axis": "train", "step": i, "train/loss": -0.5, "train/grad_norm": "nan"} for i in range(4)),
            {"axis": "eval", "step": 4, "eval/held_out": 0.75, "eval/held_out-pass@2": 1.0},
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name / "metrics.jsonl").write_text(text)
        return name

    return make


def test_the_report_shows_where_a_run_began_and_ended(run_dir, capsys) -> None:
    assert main(["report", run_dir("one")]) == 0
    page = capsys.readouterr().out.splitlines()
    assert page[0] == "one: 4 rollouts, 4 optimizer steps in 1:20"
    assert [line.split() for line in page[2:]] == [
        ["reward", "0", "->", "0.75", "▁▃▆█"],
        ["loss", "-0.5", "->", "-0.5", "▁▁▁▁"],
        ["held_out", "0.750", "at", "4"],
    ]


def test_what_rounding_leaves_of_a_loss_is_zero_and_no_curve(tmp_path, capsys) -> None:
    losses = (-3.027e-09, 9e-09, 2.794e-09)
    gaps = (1.6e-07, 2.4e-07, 1.9e-07)
    rows = [
        {"axis": "train", "step": i, "train/loss": loss, "train/train_rollout_logprob_abs_diff": gap}
        for i, (loss, gap) in enumerate(zip(losses, gaps, strict=True))
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["report", str(path)]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()[2:]] == [
        ["loss", "0", "->", "0", "▁▁▁"],
        ["log-prob", "gap", "1.6e-07", "->", "1.9e-07", "▁▁▁"],
    ]


def test_the_report_ends_with_what_went_wrong(tmp_path, capsys) -> None:
    rows = [
        {"axis": "rollout", "step": step, "time": 1.0, "rollout/fully_async/staleness/max": 2, "a": 1}
        | ({"rollout/response_len/max": 0} if step > 5 else {})
        for step in range(9)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["report", str(tmp_path)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ! ")]
    assert line.startswith("  ! everything masked (since rollout 6): no answer has a token")
    (tmp_path / "resolved.yaml").write_text("max_staleness: 2\n")
    assert main(["report", str(tmp_path)]) == 0
    assert "! staleness at its bound (since rollout 0): " in capsys.readouterr().out


def test_the_report_shows_the_curves_of_each_of_several_policies(tmp_path, capsys) -> None:
    rows = [
        {"axis": "rollout", "step": i, "rollout/raw_reward": 0.5, "rollout/a/raw_reward": i / 4, "time": 1.0}
        | {"rollout/b/raw_reward": 1 - i / 4, "rollout/a/response_len/max": 1 - i // 2}
        for i in range(4)
    ]
    rows += [{"axis": "train", "step": i, "train/b/loss": i, "time": 1.0} for i in range(2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["report", str(tmp_path)]) == 0
    *curves, alert = capsys.readouterr().out.splitlines()[2:]
    assert [line.split() for line in curves] == [
        ["reward", "0.5", "->", "0.5", "▁▁▁▁"],
        ["reward", "0", "->", "0.75", "▁▃▆█", "a"],
        ["reward", "1", "->", "0.25", "█▆▃▁", "b"],
        ["loss", "0", "->", "1", "▁█", "b"],
    ]
    assert alert.startswith("  ! everything masked (since rollout 2): policy a: no answer has a token")


def test_metrics_that_cannot_be_read_are_named(tmp_path, capsys) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n{}\n")
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}: no metrics that can be read")


@pytest.mark.parametrize(
    ("words", "file", "other"),
    [
        (["report"], "metrics.jsonl", "its file of metrics"),
        (["resume"], "resolved.yaml", "a file of flags"),
        (["diff", "."], "resolved.yaml", "a file of flags"),
    ],
)
def test_a_place_without_a_run_is_told_what_is_wanted_there(
    words, file, other, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    wanted = f"(wanted: a run's directory, or {other})"
    for place, found in (("empty", f"has no {file}"), ("nowhere", "is not there")):
        assert main([words[0], place, *words[1:]]) == 2
        assert capsys.readouterr().err == f"error: {place}: {found} {wanted}\n"


@pytest.mark.parametrize(("seconds", "text"), [(5, "0:05"), (200, "3:20"), (3909, "1:05:09")])
def test_durations_are_for_people(seconds, text) -> None:
    assert duration(seconds) == text


def test_many_values_share_a_line() -> None:
    line = sparkline(list(range(1000)))
    assert len(line) == 40 and line[0] == "▁" and line[-1] == "█" and list(line) == sorted(line)


def test_runs_differ_in_what_was_said_otherwise(run_dir, capsys) -> None:
    one, two = run_dir("one", "--lr", "1e-4"), run_dir("two", "--lr", "2e-4", "--fp32")
    assert main(["diff", one, two]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert {"- lr: 0.0001", "+ lr: 0.0002", "- fp32: (default)", "+ fp32: True", "optimizer:"} <= set(lines)
    assert not any("hf_checkpoint" in line for line in lines)
    assert main(["diff", one, one]) == 0
    assert capsys.readouterr().out == "no difference\n"


def test_a_run_goes_on_with_its_flags_from_its_checkpoints(run_dir, tmp_path, monkeypatch, capsys) -> None:
    calls: list[tuple] = []
    monkeypatch.setattr(session, "main", lambda *call: calls.append(call))
    place = tmp_path / run_dir("one", "--async")
    assert main(["resume", str(place)]) == 2
    assert "no checkpoint in" in capsys.readouterr().err
    (place / "iter_0000003").mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (command,) = printed("slime resume")
    assert command.words == ("slime", "resume", "RUN_DIR")
    assert main([*command.words[1:-1], str(place), "--num-rollout", "9"]) == 0
    assert Path.cwd() == tmp_path
    words = ["--config", str(place / "resolved.yaml"), "--load", "one", "--num-rollout", "9"]
    assert calls == [(asynchronous.train, asynchronous.refusal, asynchronous.notes, words)]
    assert "note: --wandb-key: is not in" in capsys.readouterr().err
