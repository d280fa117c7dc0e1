"""PPO in real runs: an actor, a critic and engines. One that is killed: test_resume.py."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime.observability.metric_table import undescribed

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


def test_colocated_ppo_warms_its_critic_up(start, rl_flags, model, tmp_path) -> None:
    saving = ["--save-hf", tmp_path / "hf-{rollout_id}", "--save", tmp_path / "run", "--num-rollout", 4]
    layout = ["--colocate", "--num-critic-only-steps", 1, "--rollout-shuffle"]
    whole = start([*rl_flags, *PPO, *saving, *layout]).expect_success()
    rows = whole.rows("train")
    assert "train/loss" not in rows[0] and "train/loss" in rows[1]
    assert all({"train/critic-value_loss", "train/critic-value_clipfrac"} <= rows[i].keys() for i in range(4))
    assert len({rows[i]["train/critic-value_loss"] for i in range(4)}) == 4
    assert "rollout/values" in whole.rows("rollout")[1]
    given, warm, trained = weights(model), *(weights(tmp_path / f"hf-{i}") for i in (0, 1))
    assert all(torch.equal(warm[name], given[name]) for name in warm)
    assert not all(torch.equal(trained[name], given[name]) for name in warm)


def test_a_critic_on_gpus_of_its_own_in_the_asynchronous_loop(start, rl_flags, tmp_path) -> None:
    own = ["--critic-num-gpus-per-node", 1, "--save", tmp_path / "run", "--num-critic-only-steps", 1]
    run = start([*rl_flags, *PPO, *own], script="train_async.py").expect_success()
    rows = run.rows("train")
    assert rows[1]["train/critic-value_loss"] > 0 and rows[1]["train/grad_norm"] > 0
    assert undescribed(run.names()) == set()
    assert (tmp_path / "run" / "critic" / "latest_checkpointed_iteration.txt").read_text() == "1"
    run.expect_no_processes()
