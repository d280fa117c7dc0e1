"""Tasks that ``slime new-task`` writes: a short run in the suite, the whole curve at night."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from slime.cli.new_task import FORMS, write_task
from slime.observability.jsonl import read_metrics

pytestmark = [pytest.mark.e2e]

GAIN = 0.3


def test_a_task_is_trained_by_its_own_file(start, model, tmp_path) -> None:
    """Two steps of the form with a tool, from a random model."""
    task, out = tmp_path / "task", tmp_path / "out"
    write_task(task, "multi-turn")
    subprocess.run(
        [sys.executable, str(task / "make_data.py"), "--output", str(tmp_path / "data")], check=True
    )
    code = "slime.cli.tasks.multi_turn.task"
    run = start(
        [
            *("--config", task / "run.yaml", "--run-dir", out, "--save-hf", tmp_path / "hf"),
            *("--hf-checkpoint", model, "--prompt-data", tmp_path / "data/rl.jsonl"),
            *("--eval-prompt-data", "held_out", f"{tmp_path}/data/eval.jsonl@[:4]", "--num-gpus-per-node", 8),
            *("--custom-rm-path", f"{code}.reward", "--custom-generate-function-path", f"{code}.generate"),
            *("--num-rollout", 2, "--rollout-batch-size", 4, "--global-batch-size", 32),
        ]
    ).expect_success()
    assert set(run.rows("rollout")) == {0, 1} and "eval/held_out" in run.rows("eval")[0]
    record = yaml.safe_load((out / "resolved.yaml").read_text())
    assert record["rollout"]["rollout_batch_size"] == 4 and record["optimizer"]["lr"] == 4e-4


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("form", FORMS)
def test_a_task_learns(form, tmp_path) -> None:
    write_task(tmp_path / "t", form)
    scripts = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", str(tmp_path / "t/run.sh")],
        env={"PATH": f"{scripts}:/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=3500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    scores = {
        step: row["eval/held_out"]
        for step, row in read_metrics(tmp_path / "t/outputs/run/metrics.jsonl")["eval"].items()
    }
    assert scores[20] >= scores[0] + GAIN, json.dumps(scores)
