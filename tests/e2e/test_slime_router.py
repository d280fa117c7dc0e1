"""A run through slime's own router trains on what a run through sglang-router trains on."""

import os
from pathlib import Path

import pytest

from tests.e2e.test_recovery import VICTIM

pytestmark = pytest.mark.e2e

TWO_ENGINES = ["--rollout-num-gpus", 2, "--num-rollout", 4]
THROUGH_TEXT = [
    "--use-slime-router",
    "--slime-router-middleware-paths",
    "slime.router.middleware_hub.radix_tree_middleware.RadixTreeMiddleware",
    "--custom-generate-function-path",
    "slime.rollout.text_generation.generate",
]
WITHOUT_ROUTER = [
    "--use-fault-tolerance",
    "--custom-rm-path",
    "tests.e2e.test_recovery.router_ending_reward",
]
DEADLY = ["--use-fault-tolerance", "--custom-rm-path", "tests.e2e.test_recovery.deadly_reward"]
SAME = ("train/loss", "train/grad_norm", "train/train_rollout_logprob_abs_diff")


def test_text_through_slimes_router_trains_as_tokens_through_the_stock_one_though_it_dies_as_an_engine_does(
    start, gate, rl_flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling depends on the sample alone, so a request that is asked again has the same answer."""
    lost_router = tmp_path / "router"
    monkeypatch.setenv(VICTIM, str(lost_router))
    stock = start([*rl_flags, *TWO_ENGINES, *WITHOUT_ROUTER]).expect_success()
    assert lost_router.exists()
    note, last_rollout = tmp_path / "victim", gate(48)
    monkeypatch.setenv(VICTIM, str(note))
    run = start([*rl_flags, *TWO_ENGINES, *THROUGH_TEXT, *DEADLY])
    run.wait_for(lambda: any("slime.router" in command for command in run.processes().values()), "a router")
    run.wait_for(lambda: len(run.rows("train")) >= 3, "training after the death of an engine")
    assert len(run.engines()) == 2
    last_rollout.touch()
    run.expect_success()
    assert note.exists() and int(note.read_text()) not in run.engines()
    ours, theirs = run.rows("train"), stock.rows("train")
    assert list(ours) == list(theirs) == [0, 1, 2, 3]
    for step, row in ours.items():
        assert {key: row[key] for key in SAME} == {key: theirs[step][key] for key in SAME}
    rewards = [[row["rollout/raw_reward"] for row in r.rows("rollout").values()] for r in (run, stock)]
    assert rewards[0] == rewards[1]
    assert not os.path.exists(tmp_path / "router.args.json")
    run.expect_no_processes()
