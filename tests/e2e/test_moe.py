"""A mixture of experts through the loop, its experts dealt out to two trainer ranks."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.conftest import ROOT

pytestmark = pytest.mark.e2e


@pytest.fixture
def moe_model(tmp_path: Path) -> Path:
    path = tmp_path / "moe"
    make = ["tools/make_tiny_model.py", "--output", str(path), "--hidden-size", "64", "--num-layers", "2"]
    subprocess.run([sys.executable, *make, "--family", "qwen3_moe"], cwd=ROOT, check=True)
    return path


def test_grpo_with_expert_parallelism(start, rl_flags, moe_model, tmp_path) -> None:
    """Weights reach the engine under every name, and in the export all of them have learnt."""
    exported = tmp_path / "exported"
    layout = [
        *("--hf-checkpoint", moe_model, "--colocate", "--actor-num-gpus-per-node", 2),
        *("--expert-model-parallel-size", 2, "--expert-tensor-parallel-size", 1),
        *("--moe-token-dispatcher-type", "alltoall", "--moe-aux-loss-coeff", 0.01),
        *("--save", tmp_path / "save", "--save-interval", 2, "--save-hf", exported),
        *("--ci-test", "--ci-train-rollout-logprob-abs-diff-threshold", 1e-5),
    ]
    run = start([*rl_flags, *layout]).expect_success()
    steps = run.rows("train")
    assert sorted(steps) == [0, 1]
    for step in steps.values():
        assert step["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert 0 < step["train/grad_norm"] < math.inf
        assert 0.9 < step["train/moe_load_balancing_loss"] < 8
    run.expect_no_processes()
    before, after = (load_file(path / "model.safetensors") for path in (moe_model, exported))
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before)
