"""SGLang and the trainer on one GPU: a short GRPO run through train.py."""

import importlib.util

import pytest

from tests.e2e.conftest import data, model, rl_flags, start_alone  # noqa: F401  fixtures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs slime[sglang]"),
]


@pytest.mark.timeout(600)
def test_three_rollouts_with_sglang(start_alone, rl_flags) -> None:  # noqa: F811
    """In bfloat16: it has no float32 on GPUs."""
    flags = [flag for flag in rl_flags if flag != "--fp32"]
    sharing = ["--colocate", "--num-gpus-per-node", 1, "--check-weight-update-equal"]
    engine = ["--rollout-engine", "sglang", "--sglang-mem-fraction-static", 0.3]
    run = start_alone([*flags, "--bf16", *sharing, *engine, "--num-rollout", 3, "--ci-test"])
    run.expect_success(timeout=540)
    rows = run.rows("train")
    assert len(rows) == 3
    # What two implementations in the same precision leave between them.
    assert all(row["train/train_rollout_logprob_abs_diff"] < 5e-2 for row in rows.values())
    run.expect_no_processes()
