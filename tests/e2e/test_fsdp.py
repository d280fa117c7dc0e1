"""The loop with the FSDP trainer, with every process real."""

import math

import pytest

pytestmark = pytest.mark.e2e

LAYOUTS = {
    "colocated, two ranks": [
        *("--colocate", "--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 2, "--use-kl-loss"),
        *("--kl-loss-coef", 0.1, "--kl-loss-type", "k3", "--gradient-checkpointing"),
    ],
    "colocated, two ranks, adapters": [
        *("--colocate", "--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 1, "--use-kl-loss"),
        *("--kl-loss-coef", 0.1, "--kl-loss-type", "k3", "--lora-rank", 8, "--lr", 1e-2),
        *("--check-weight-update-equal", "--served-policy-bound", 1e-5),
    ],
    "disaggregated, two ranks that share sequences, a critic": [
        *("--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 1, "--context-parallel-size", 2),
        *("--advantage-estimator", "ppo", "--lambd", 0.95, "--critic-lr", 1e-3, "--rollout-top-p", 0.9),
    ],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loop_runs_and_trainer_and_engine_agree(layout: str, start, rl_flags, model) -> None:
    extra = ["--ref-load", model] if "--use-kl-loss" in LAYOUTS[layout] else []
    checks = ["--ci-test", "--ci-train-rollout-logprob-abs-diff-threshold", 1e-5]
    run = start([*rl_flags, "--train-backend", "fsdp", *LAYOUTS[layout], *extra, *checks]).expect_success()
    steps = run.rows("train")
    assert sorted(steps) == [0, 1]
    for step in steps.values():
        assert step["train/ppo_kl"] == pytest.approx(0, abs=1e-8)
        assert step["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert 0 < step["train/grad_norm"] < math.inf
        assert ("train/critic-value_loss" in step) == ("ppo" in LAYOUTS[layout])
    run.expect_no_processes()
