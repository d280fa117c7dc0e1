"""A model learns a game by playing against what it was some rollouts ago."""

from pathlib import Path

import pytest
import torch

from examples.self_play.make_data import main as make_games
from slime.utils.types import Sample
from tests.e2e.conftest import ROOT

pytestmark = pytest.mark.e2e

ROLLOUTS, INTERVAL = 12, 5


@pytest.fixture
def flags(model: Path, tmp_path: Path) -> list[object]:
    games = tmp_path / "games.jsonl"
    make_games(["--output", str(games)])
    return [
        *("--hf-checkpoint", model, "--fp32", "--num-gpus-per-node", 8, "--seed", 7),
        *("--sglang-config", ROOT / "examples/self_play/fleet.yaml"),
        *("--custom-generate-function-path", "examples.self_play.game.play"),
        *("--prompt-data", games, "--input-key", "prompt", "--label-key", "label"),
        *("--rollout-max-response-len", 8, "--num-rollout", ROLLOUTS, "--rollout-batch-size", 8),
        *("--n-samples-per-prompt", 16, "--num-steps-per-rollout", 2, "--lr", 6e-3),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", 4096, "--advantage-estimator", "grpo"),
        *("--eval-prompt-data", "first", games, "--eval-interval", ROLLOUTS),
        *("--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 3),
        *("--save-debug-rollout-data", tmp_path / "{rollout_id}.pt"),
    ]


def versions(recording: Path) -> dict[str | None, set[str]]:
    """The weights that each player has answered with."""
    samples = [Sample.from_dict(s) for s in torch.load(recording, weights_only=True)["samples"]]
    players = {sample.policy for sample in samples}
    return {p: {v for s in samples if s.policy == p for v in s.weight_versions} for p in players}


def test_a_model_beats_its_first_version_after_playing_against_earlier_ones(
    start, flags, tmp_path: Path
) -> None:
    run = start(flags).expect_success()
    won = [row["eval/first"] for row in run.rows("eval").values()]
    assert 0.3 < won[0] < 0.7 and won[-1] > 0.85, won
    # Rollout r is made by version r + 1; its opponent changes with every fifth, and is what it was then.
    for rollout_id, row in run.rows("rollout").items():
        past = rollout_id - rollout_id % INTERVAL + 1
        assert row["fleet/past/weight_version"] == past
        found = versions(tmp_path / f"{rollout_id}.pt")
        assert found == {None: {str(rollout_id + 1)}, "past": {str(past)}}
        # What the opponent has earned is in no metric: of a game both have the same share in all.
        assert row["rollout/raw_reward"] != pytest.approx(0.5, abs=1e-6)
    gaps = [row["train/train_rollout_logprob_abs_diff"] for row in run.rows("train").values()]
    assert len(gaps) == 2 * ROLLOUTS and max(gaps[::2]) < 1e-4
    run.expect_no_processes()
