"""Tasks that ``slime new-task`` writes: a short run in the suite, the whole curve at night."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from slime.cli.new_task import FORMS, write_task
from slime.cli.run_dir import read_record
from slime.observability.jsonl import read_metrics
from slime.observability.metric_table import undescribed
from tests.page_commands import ROOT, commands_of
from tests.page_runs import printed
from tests.wheel import installed

pytestmark = [pytest.mark.e2e]

GAIN = 0.2


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
    told = ["Ray is up; starting", "engines and data are ready", "the trainer is ready", "the run begins"]
    places = [run.output.index(phase) for phase in told]
    assert places == sorted(places) and run.output.count("the run begins") == 1
    assert set(run.rows("rollout")) == {0, 1} and "eval/held_out" in run.rows("eval")[0]
    assert undescribed(run.names()) == set()
    record = read_record(str(out)).flags
    assert (record["rollout_batch_size"], record["lr"], record["save"]) == (4, 4e-4, str(out))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of somebody who has installed the wheel, and no clone."""
    return installed(tmp_path_factory.mktemp("wheel"))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("form", FORMS)
def test_a_task_learns_without_a_file_of_the_clone(form, wheel, tmp_path) -> None:
    def say(*words: str, cwd: Path = tmp_path) -> str:
        done = subprocess.run(words, env=wheel, cwd=cwd, capture_output=True, text=True, timeout=3500)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    assert say("python", "-c", "import slime; print(slime.__file__)").startswith(wheel["PYTHONPATH"])
    say("slime", "new-task", "t", "--form", form)
    (command,), (tests,) = printed("bash run.sh"), printed("python -m pytest test_task.py")
    page = commands_of(ROOT / f"slime/cli/tasks/{form.replace('-', '_')}/README.md")
    assert {command.words, tests.words} <= {printed.words for printed in page}
    shown = say(*command.words, cwd=tmp_path / "t")
    say(*tests.words, cwd=tmp_path / "t")
    assert re.search(r"^outputs/run: \d+ rollouts, \d+ optimizer steps in ", shown, re.MULTILINE)
    evals = read_metrics(tmp_path / "t/outputs/run/metrics.jsonl")["eval"]
    scores = {step: row["eval/held_out"] for step, row in evals.items()}
    assert len(scores) > 4 and scores[max(scores)] >= scores[0] + GAIN, scores
