"""A mixture of experts through the loop: experts on two ranks, routes of the engine replayed."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.families import tiny_family
from tools.make_tiny_model import main as make_tiny_model
from tools.make_tiny_model import make_tokenizer

pytestmark = pytest.mark.e2e

R3 = ("--use-rollout-routing-replay", "--use-slime-router")


@pytest.fixture
def moe_model(tmp_path: Path) -> Path:
    path = tmp_path / "moe"
    shape = ["--hidden-size", "64", "--num-layers", "2", "--family", "qwen3_moe"]
    make_tiny_model(["--output", str(path), *shape])
    return path


def test_grpo_with_expert_parallelism(start, rl_flags, moe_model, tmp_path) -> None:
    """Weights reach the engine under every name, and in the export all of them have learnt."""
    exported = tmp_path / "exported"
    layout = [
        *("--hf-checkpoint", moe_model, "--colocate", "--actor-num-gpus-per-node", 2, *R3),
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


def test_grpo_of_a_family_that_transformers_serves(start, rl_flags, tmp_path) -> None:
    """Multi-latent attention and biases of experts: engine and trainer agree before and after an update."""
    path = tmp_path / "deepseek_v3"
    tokenizer = make_tokenizer()
    tiny_family("deepseek_v3", path, vocab_size=320, eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(path)
    layout = [
        *("--hf-checkpoint", path, "--colocate", "--actor-num-gpus-per-node", 2, *R3),
        *("--expert-model-parallel-size", 2, "--expert-tensor-parallel-size", 1),
        *("--moe-token-dispatcher-type", "alltoall", "--moe-router-bias-update-rate", 0.01),
    ]
    steps = start([*rl_flags, *layout]).expect_success().rows("train")
    assert sorted(steps) == [0, 1]
    for step in steps.values():
        assert step["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert 0 < step["train/grad_norm"] < math.inf
