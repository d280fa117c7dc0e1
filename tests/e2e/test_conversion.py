"""A converted checkpoint begins a run, as policy and as reference, with flags that launch scripts have."""

import pytest

from tests.e2e.conftest import ROOT
from tests.forking import ForkedScript

pytestmark = pytest.mark.e2e


def test_a_run_begins_with_what_the_converter_wrote(start, rl_flags, model, tmp_path) -> None:
    converted = tmp_path / "tiny_torch_dist"
    words, log = ["--hf-checkpoint", str(model), "--save", str(converted)], tmp_path / "log"
    tool = ForkedScript(ROOT / "tools/convert_hf_to_torch_dist.py", words, log, cwd=ROOT)
    assert tool.wait(600) == 0, log.read_text()
    weights = ("--load", converted, "--ref-load", converted, "--save", tmp_path / "run", "--save-interval", 1)
    three = (
        "--optimizer-cpu-offload",
        "--overlap-cpu-optimizer-d2h-h2d",
        "--use-precision-aware-optimizer",
    )
    kl = ("--use-kl-loss", "--kl-loss-coef", 0.01, "--kl-loss-type", "low_var_kl")
    run = start([*rl_flags, *weights, *three, *kl, "--use-mcore-models", "--ci-test"]).expect_success()
    rows = run.rows("train")
    assert sorted(rows) == [0, 1]
    # Policy and reference are the same weights, which are also those of the engine.
    assert rows[0]["train/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert rows[0]["train/train_rollout_logprob_abs_diff"] < 1e-5
    assert rows[1]["train/kl_loss"] > 0
    assert "--use-mcore-models: has no effect" in run.output
    assert (tmp_path / "run/latest_checkpointed_iteration.txt").read_text() == "1"
