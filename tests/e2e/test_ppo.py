"""PPO in real runs: an actor, a critic and engines."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime.observability.metric_table import undescribed
from tests.e2e.test_resume import WAITING, numbers

pytestmark = pytest.mark.e2e

PPO = [
    "--advantage-estimator",
    "ppo",
    "--gamma",
    0.99,
    "--lambd",
    0.95,
    "--critic-lr",
    1e-3,
    "--save-interval",
    1,
]


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def test_colocated_ppo_warms_its_critic_up_and_a_killed_run_resumes(
    start, gate, rl_flags, model, data, tmp_path
) -> None:
    def flags(save: Path) -> list[object]:
        saving = ["--save", save, "--load", save, "--save-hf", save / "hf-{rollout_id}", "--num-rollout", 4]
        evaluating = ["--eval-interval", 1, "--eval-prompt-data", "calc", data / "eval.jsonl"]
        layout = ["--colocate", "--num-critic-only-steps", 1, "--rollout-shuffle"]
        return [*rl_flags, *PPO, *saving, *evaluating, *layout, *WAITING]

    last_rollout = gate(48)
    last_rollout.touch()
    whole = start(flags(tmp_path / "whole")).expect_success()
    rows = whole.rows("train")
    assert "train/loss" not in rows[0] and "train/loss" in rows[1]
    assert all({"train/critic-value_loss", "train/critic-value_clipfrac"} <= rows[i].keys() for i in range(4))
    assert len({rows[i]["train/critic-value_loss"] for i in range(4)}) == 4
    assert "rollout/values" in whole.rows("rollout")[1]
    given, warm, trained = weights(model), *(weights(tmp_path / f"whole/hf-{i}") for i in (0, 1))
    assert all(torch.equal(warm[name], given[name]) for name in warm)
    assert not all(torch.equal(trained[name], given[name]) for name in warm)

    metrics = tmp_path / "killed.jsonl"
    last_rollout.unlink()
    killed = start(flags(tmp_path / "killed"), metrics=metrics)
    marker = tmp_path / "killed" / "critic" / "latest_checkpointed_iteration.txt"
    # Killed when the critic's second checkpoint is there; the actor's may be or not.
    killed.wait_for(lambda: marker.exists() and int(marker.read_text()) >= 1, "the second checkpoint")
    killed.kill()
    killed.expect_no_processes()
    assert len(killed.rows("train")) < 4, "the run was over before it was killed"
    last_rollout.touch()
    resumed = start(flags(tmp_path / "killed"), metrics=metrics).expect_success()
    for axis in ("train", "rollout", "eval"):
        assert numbers(resumed.rows(axis)) == numbers(whole.rows(axis))


def test_a_critic_on_gpus_of_its_own_in_the_asynchronous_loop(start, rl_flags, tmp_path) -> None:
    own = ["--critic-num-gpus-per-node", 1, "--save", tmp_path / "run", "--num-critic-only-steps", 1]
    run = start([*rl_flags, *PPO, *own], script="train_async.py").expect_success()
    rows = run.rows("train")
    assert rows[1]["train/critic-value_loss"] > 0 and rows[1]["train/grad_norm"] > 0
    assert undescribed(run.names()) == set()
    assert (tmp_path / "run" / "critic" / "latest_checkpointed_iteration.txt").read_text() == "1"
    run.expect_no_processes()
