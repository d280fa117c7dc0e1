import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime.config.run import run_config
from slime.observability.console import ConsoleSink
from slime.observability.jsonl import read_metrics
from slime.observability.tracking import Tracker, init_tracking, metrics_path
from slime.observability.wandb_utils import loggable_values
from tests.run_args import with_groups


def make_args(tmp_path, **overrides):
    values = dict(
        metrics_file=None, save=str(tmp_path), num_rollout=15, loss_type="policy_loss",
        use_wandb=False, use_tensorboard=False, tb_project_name=None, tb_experiment_name="exp", run_name=None,
        wandb_mode="offline", wandb_key=None, wandb_host=None, wandb_team=None, wandb_project="slime-test",
        wandb_group="group", wandb_random_suffix=True, wandb_dir=str(tmp_path), wandb_run_id=None,
    )  # fmt: skip
    return with_groups(values | overrides)


def test_metrics_file_defaults_to_the_save_directory(tmp_path):
    assert metrics_path(run_config(make_args(tmp_path))) == tmp_path / "metrics.jsonl"
    assert metrics_path(run_config(make_args(tmp_path, save=None))) == Path("outputs/metrics.jsonl")
    assert metrics_path(run_config(make_args(tmp_path, metrics_file="a/b.jsonl"))) == Path("a/b.jsonl")


def test_rows_reach_the_file_and_the_console(tmp_path, capsys):
    args = make_args(tmp_path)
    tracker = init_tracking(run_config(args))
    tracker.add(ConsoleSink(run_config(args)))
    tracker.log({"train/loss": 0.25}, axis="train", step=0)
    tracker.log({"rollout/raw_reward": 0.5, "perf/step_time": 2.0}, axis="rollout", step=0)
    tracker.finish()
    tracker.finish()
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert metrics["train"][0]["train/loss"] == 0.25
    assert metrics["rollout"][0]["rollout/raw_reward"] == 0.5
    assert capsys.readouterr().out == "rollout   1/15  reward 0.500  loss 0.2500  | step 2.0s\n"


def test_an_unknown_axis_is_refused_and_an_empty_row_is_not_written(tmp_path):
    tracker = init_tracking(run_config(make_args(tmp_path)))
    tracker.log({}, axis="train", step=0)
    with pytest.raises(ValueError, match="'steps'"):
        tracker.log({"a": 1}, axis="steps", step=0)
    tracker.finish()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_the_rows_of_a_rollout_are_one_line(tmp_path):
    stream = io.StringIO()
    tracker = Tracker([ConsoleSink(run_config(make_args(tmp_path)), stream)])
    tracker.log({"rollout/raw_reward": 0.5}, axis="rollout", step=0)
    for step in range(10):
        tracker.log({"train/loss": float(step)}, axis="train", step=step)
    tracker.log({"eval/greedy": 1.0}, axis="eval", step=1)
    assert stream.getvalue() == ""
    tracker.log({"perf/step_time": 1.0}, axis="rollout", step=0)
    tracker.finish()
    assert stream.getvalue() == (
        "rollout   1/15  reward 0.500  loss 9.0000  | step 1.0s\neval at   1  greedy 1.000\n"
    )


def test_a_line_says_how_each_of_several_policies_does(tmp_path):
    stream = io.StringIO()
    tracker = Tracker([ConsoleSink(run_config(make_args(tmp_path)), stream)])
    rows = {"rollout/raw_reward": 0.5, "rollout/a/raw_reward": 0.25, "rollout/b/raw_reward": 0.75}
    tracker.log(rows | {"perf/step_time": 2.0, "perf/a/train_time": 1.0}, axis="rollout", step=0)
    tracker.log({"train/b/loss": 0.5, "train/step": 0}, axis="train", step=0)
    tracker.log({"train/a/loss": 0.125, "train/step": 1}, axis="train", step=1)
    tracker.log(rows | {"perf/step_time": 2.0}, axis="rollout", step=1)
    first, second = stream.getvalue().splitlines()
    assert first == "rollout   1/15  reward 0.500  | a reward 0.250  | b reward 0.750  | step 2.0s"
    own = "a reward 0.250  loss 0.1250  | b reward 0.750  loss 0.5000"
    assert second == f"rollout   2/15  reward 0.500  | {own}  | step 2.0s"


def test_fine_tuning_shows_no_reward(tmp_path):
    stream = io.StringIO()
    args = make_args(tmp_path)
    args.loss_type = "sft_loss"
    rows = {"rollout/raw_reward": 0.0, "train/loss": 0.5, "perf/step_time": 1.0}
    ConsoleSink(run_config(args), stream).write("rollout", 0, rows)
    assert stream.getvalue() == "rollout   1/15  loss 0.5000  | step 1.0s\n"


def test_what_rounds_to_zero_has_no_sign(tmp_path):
    """As the loss of a rollout that is one optimizer step: rewards are centred within groups."""
    stream = io.StringIO()
    ConsoleSink(run_config(make_args(tmp_path)), stream).write(
        "rollout", 0, {"train/loss": -1e-9, "perf/step_time": 1.0}
    )
    assert "loss 0.0000 " in stream.getvalue()


def test_a_step_that_was_never_ended_is_shown_at_the_end(tmp_path):
    stream = io.StringIO()
    tracker = Tracker([ConsoleSink(run_config(make_args(tmp_path)), stream)])
    tracker.log({"rollout/raw_reward": 0.5}, axis="rollout", step=0)
    tracker.log({"rollout/raw_reward": 0.6}, axis="rollout", step=1)
    assert stream.getvalue() == ""
    tracker.finish()
    assert stream.getvalue() == "rollout   1/15  reward 0.500\nrollout   2/15  reward 0.600\n"


def test_a_rollout_that_is_there_early_waits_for_its_turn(tmp_path):
    stream = io.StringIO()
    tracker = Tracker([ConsoleSink(run_config(make_args(tmp_path)), stream)])
    for step in range(2):
        tracker.log({"rollout/raw_reward": step / 2}, axis="rollout", step=step)
    for step in range(2):
        tracker.log({"train/loss": step + 1.0}, axis="train", step=step)
        tracker.log({"perf/step_time": 1.0}, axis="rollout", step=step)
    assert stream.getvalue() == (
        "rollout   1/15  reward 0.000  loss 1.0000  | step 1.0s\n"
        "rollout   2/15  reward 0.500  loss 2.0000  | step 1.0s\n"
    )


def test_the_time_left_is_told_once_there_are_steps_to_tell_it_by(tmp_path):
    stream = io.StringIO()
    sink = ConsoleSink(run_config(make_args(tmp_path, num_rollout=200)), stream)
    for step, seconds in enumerate((90.0, 30.0, 30.0, *[30.0] * 10)):
        sink.write("rollout", step, {"perf/step_time": seconds})
    ends = [line.partition("left ")[2] for line in stream.getvalue().splitlines()]
    assert ends[:3] == ["", "", "2:44:10"] and ends[-1] == "1:33:30"
    stream.truncate(0)
    sink.write("rollout", 199, {"perf/step_time": 30.0})
    assert "left" not in stream.getvalue(), "the last one"


def test_an_evaluation_line_names_each_dataset_once(tmp_path):
    stream = io.StringIO()
    metrics = {
        "eval/greedy": 1.0,
        "eval/greedy-truncated_ratio": 0.0,
        "eval/greedy/truncated_ratio": 0.0,
        "eval/s": 0.5,
    }
    ConsoleSink(run_config(make_args(tmp_path)), stream).write("eval", 4, metrics)
    assert stream.getvalue() == "eval at   4  greedy 1.000  s 0.500\n"


def test_train_metrics_without_a_rollout_row_are_shown_at_the_end(tmp_path):
    stream = io.StringIO()
    tracker = Tracker([ConsoleSink(run_config(make_args(tmp_path)), stream)])
    tracker.log({"train/loss": 1.0}, axis="train", step=0)
    tracker.finish()
    assert stream.getvalue() == "train  loss 1.0000\n"


@pytest.mark.parametrize(("floor", "share"), [({}, ""), ({"floor_time": 0.5}, ", 0.25 of what its path can")])
def test_the_last_line_says_what_all_weight_updates_took(tmp_path, floor, share):
    stream = io.StringIO()
    tracker = Tracker([ConsoleSink(run_config(make_args(tmp_path)), stream)])
    for step in range(2):
        took = {"wire_bytes": 3 * 10**9, "transfer_time": 2.0, "pause_time": 2.5, **floor}
        row = {f"perf/update_weights_{name}": value for name, value in took.items()}
        tracker.log({**row, "perf/step_time": 9.0}, axis="rollout", step=step)
    tracker.finish()
    last = f"weight sync: 6 GB in 4.0s (1.5 GB/s{share}), engines paused 5.0s"
    assert stream.getvalue().splitlines()[1:] == ["rollout   2/15  | step 9.0s", last]


def test_trackers_get_no_secrets(tmp_path):
    args = make_args(
        tmp_path,
        wandb_key="K",
        sglang_api_key="K",
        router_control_plane_api_keys=["id:name:admin:K"],
        router_oracle_password="K",
        router_postgres_db_url="postgres://user:K@db/slime",
        router_redis_url="redis://:K@db",
        sglang_ssl_keyfile_password="K",
        judges=["http://user:K@judge:8000", ("second=http://a:K@b?t=K", 2)],
        own_config={"url": "http://user:K@judge", "judge": {"api_key": "K", "password": "K", "size": 1}},
        train_env_vars={"HF_TOKEN": "K"},
        fallbacks={"http://user:K@judge"},
        rm_url="https://user:K@judge:8000/score?token=K#K",
        eval_interval=5,
        input_key="prompt",
    )
    shown = loggable_values(vars(args))
    assert "'K" not in str(shown) and "=K" not in str(shown) and ":K" not in str(shown)
    assert shown["judges"] == ["http://***@judge:8000", ["second=http://***@b?***", 2]]
    assert shown["own_config"]["judge"] == {"api_key": "***", "password": "***", "size": 1}
    assert shown["fallbacks"] == "{'http://***@judge'}"
    assert shown["train_env_vars"] == {"HF_TOKEN": "***"}
    assert shown["rm_url"] == "https://***@judge:8000/score?***"
    assert (shown["eval_interval"], shown["input_key"], shown["save"]) == (5, "prompt", str(tmp_path))


def test_tensorboard_gets_the_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "tb"))
    tracker = init_tracking(run_config(make_args(tmp_path, use_tensorboard=True)))
    tracker.log({"train/loss": 0.25, "train/note": "text"}, axis="train", step=3)
    tracker.finish()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb" / "exp")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(3, 0.25)]
    assert events.Tags()["scalars"] == ["train/loss"]


_JOBS = """
import json, sys
from pathlib import Path
from slime.config.run import run_config
from tests.observability.test_tracking import init_tracking, make_args

place = Path(sys.argv[1])

def job(**flags):
    args = make_args(place, use_wandb=True, **flags)
    tracker = init_tracking(run_config(args))
    tracker.log({"train/loss": 0.25}, axis="train", step=3)
    tracker.finish()
    assert args.wandb_run_id is None
    return [tracker.context["wandb_run_id"], json.loads((place / "wandb_run.json").read_text())["group"]]

first, resumed = job(), job(finetune=False)
anew = job(wandb_group="other")
(place / "wandb_run.json").write_text("{")
try:
    job(finetune=False)
except RuntimeError as error:
    print(json.dumps([first, resumed, anew, str(error)]))
"""


@pytest.mark.slow
def test_offline_wandb_leaves_a_run_on_disk_and_a_job_that_goes_on_continues_it(tmp_path):
    """In a process of its own: wandb starts a service that would outlive the test."""
    command = [sys.executable, "-c", _JOBS, str(tmp_path)]
    env, root = os.environ | {"WANDB_SILENT": "true"}, Path(__file__).parents[2]
    env.pop("WANDB_RUN_ID", None)
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr
    first, resumed, anew, error = json.loads(done.stdout.splitlines()[-1])
    assert first[1].startswith("group_") and resumed == first
    assert anew[0] != first[0] and anew[1].startswith("other_")
    assert error.startswith(f"{tmp_path / 'wandb_run.json'}: does not hold the names of a wandb run")
    records = [*tmp_path.glob(f"wandb/offline-run-*-{first[0]}/*.wandb")]
    assert records and all(b"train/loss" in record.read_bytes() for record in records)
