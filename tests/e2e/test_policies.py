"""Two models learn a game in one run, and go on together."""

import shutil
from pathlib import Path

import pytest

from examples.two_policies.make_data import main as make_tasks
from slime.cli.report import page
from slime.observability.jsonl import read_metrics
from tests.e2e.conftest import ROOT
from tests.e2e.test_resume import numbers

pytestmark = pytest.mark.e2e

ROLLOUTS, SAVED = 20, 18
MARKER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def flags(model: Path, tmp_path: Path) -> list[object]:
    make_tasks(["--output", str(tmp_path / "tasks.jsonl")])
    run = tmp_path / "run"
    return [
        *("--hf-checkpoint", model, "--fp32", "--num-gpus-per-node", 8, "--seed", 7),
        *("--policies", ROOT / "examples/two_policies/policies.yaml"),
        *("--custom-generate-function-path", "examples.two_policies.game.play"),
        *("--prompt-data", tmp_path / "tasks.jsonl", "--input-key", "prompt", "--label-key", "label"),
        *("--rollout-max-response-len", 8, "--num-rollout", ROLLOUTS, "--rollout-batch-size", 8),
        *("--n-samples-per-prompt", 16, "--num-steps-per-rollout", 2, "--lr", 6e-3),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", 4096, "--advantage-estimator", "grpo"),
        *("--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 1),
        *("--save", run, "--load", run, "--save-interval", SAVED),
    ]


def test_two_policies_learn_a_game_and_go_on_from_what_both_have_saved(start, flags, tmp_path: Path) -> None:
    first = start(flags).expect_success()
    rollouts, train = first.rows("rollout"), first.rows("train")
    for policy, gain in (("writer", 0.3), ("editor", 0.15)):
        rewards = [row[f"rollout/{policy}/raw_reward"] for row in rollouts.values()]
        assert rewards[-1] > rewards[0] + gain, (policy, rewards)
        # Its engines have the weights of its own trainer.
        gaps = [row[f"train/{policy}/train_rollout_logprob_abs_diff"] for row in train.values()]
        assert len(gaps) == 2 * ROLLOUTS and max(gaps[::2]) < 1e-4
        assert rollouts[3][f"rollout/{policy}/response_lengths"] > 0
    assert train[5]["train/writer/loss"] != train[5]["train/editor/loss"]
    first.expect_no_processes()
    assert "| writer reward" in first.output and "| editor reward" in first.output
    assert {f"{name}  {policy}" for name in ("reward", "loss") for policy in ("writer", "editor")} <= {
        f"{line.split()[0]}  {line.split()[-1]}"
        for line in page("run", read_metrics(first.metrics)).splitlines()
        if line.strip()
    }

    # As if it had been killed after the last save of the writer, before that of the editor.
    editor = tmp_path / "run/policies/editor"
    last, before = f"iter_{ROLLOUTS - 1:07d}", SAVED - 1
    assert (tmp_path / "run" / last).is_dir()
    shutil.rmtree(editor / last)
    (editor / MARKER).write_text(str(before))
    resumed = start(flags).expect_success()
    assert f"iteration {before} is the latest that is whole of every policy" in resumed.output
    for axis, again in (("train", range(2 * SAVED, 2 * ROLLOUTS)), ("rollout", range(SAVED, ROLLOUTS))):
        found, whole = numbers(resumed.rows(axis)), numbers(first.rows(axis))
        assert found == {step: whole[step] for step in again}
