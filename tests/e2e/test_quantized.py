"""GRPO with engines of float8: they start with it, and get every update in it."""

import json
from pathlib import Path

import pytest

from tools.convert_hf_to_fp8 import main as to_fp8

pytestmark = pytest.mark.e2e


@pytest.mark.timeout(420)
def test_grpo_with_float8_engines(start, rl_flags, model, tmp_path: Path) -> None:
    """The gap between trainer and engine is that of quantisation, before and after an update."""
    quantised, exported = tmp_path / "fp8", tmp_path / "exported"
    words = ["--model-dir", str(model), "--save-dir", str(quantised), "--block-size", "16", "16"]
    assert to_fp8(words) == 0
    layout = [
        *("--hf-checkpoint", quantised, "--ref-load", model, "--use-tis"),
        *("--save", tmp_path / "save", "--save-interval", 2, "--save-hf", exported),
    ]
    run = start([*rl_flags, *layout]).expect_success()
    steps = run.rows("train")
    assert sorted(steps) == [0, 1]
    for step in steps.values():
        assert 1e-5 < step["train/train_rollout_logprob_abs_diff"] < 0.1
    assert "quantization_config" not in json.loads((exported / "config.json").read_text())
    run.expect_no_processes()
