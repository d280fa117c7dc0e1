"""Policies of one run play against earlier versions of each other and of themselves."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from examples.two_policies.make_data import main as make_tasks
from slime.utils.types import Sample
from tests.e2e.league import EVERYBODY
from tools.make_tiny_model import main as make_tiny_model

pytestmark = pytest.mark.e2e

ROLLOUTS, INTERVAL = 4, 2


@pytest.fixture
def flags(model: Path, tmp_path: Path) -> list[object]:
    make_tasks(["--output", str(tmp_path / "tasks.jsonl")])
    size = ["--hidden-size", "64", "--num-layers", "2"]
    make_tiny_model(["--output", str(tmp_path / "other"), *size, "--seed", "5"])
    groups = [{"worker_type": "regular", "num_gpus": 1}]
    versions: list[dict[str, Any]] = [
        {"name": "b"},
        {"name": "past-b", "update_interval": INTERVAL},
        {"name": "first-b", "update_weights": False},
    ]
    models = [{**version, "server_groups": groups} for version in versions]
    (tmp_path / "b.yaml").write_text(yaml.safe_dump({"sglang": models}))
    own = {
        "hf_checkpoint": str(tmp_path / "other"),
        "rollout_num_gpus": 3,
        "sglang_config": str(tmp_path / "b.yaml"),
    }
    (tmp_path / "policies.yaml").write_text(
        yaml.safe_dump({"policies": [{"name": "a"}, {"name": "b", **own}]})
    )
    return [
        *("--hf-checkpoint", model, "--fp32", "--num-gpus-per-node", 8, "--seed", 7),
        *("--policies", tmp_path / "policies.yaml"),
        *("--custom-generate-function-path", "tests.e2e.league.play"),
        *("--prompt-data", tmp_path / "tasks.jsonl", "--input-key", "prompt", "--label-key", "label"),
        *("--rollout-max-response-len", 8, "--num-rollout", ROLLOUTS, "--rollout-batch-size", 2),
        *("--n-samples-per-prompt", 4, "--global-batch-size", 8, "--lr", 1e-3, "--weight-decay", 0.0),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", 4096, "--advantage-estimator", "grpo"),
        *("--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 1),
        *("--save-debug-rollout-data", tmp_path / "{rollout_id}.pt"),
    ]


def test_policies_play_against_earlier_versions_of_others_and_of_themselves(
    start, flags, tmp_path: Path
) -> None:
    run = start(flags).expect_success()
    log_probs: list[dict[str, Any]] = []
    for rollout in range(ROLLOUTS):
        recorded = torch.load(tmp_path / f"{rollout}.pt", weights_only=True)["samples"]
        samples = [Sample.from_dict(sample) for sample in recorded]
        past, own = str(rollout - rollout % INTERVAL + 1), str(rollout + 1)
        whose = {name: [s for s in samples if s.policy == name] for name in EVERYBODY}
        assert {len(answers) for answers in whose.values()} == {2 * 4}
        found = {name: {v for s in whose[name] for v in s.weight_versions} for name in ("a", "b", "past-b")}
        assert found == {"a": {own}, "b": {own}, "past-b": {past}}
        assert run.rows("rollout")[rollout]["fleet/past-b/weight_version"] == int(past)
        log_probs.append(_by_weights(samples))
    # Whose weights these are: equal log-probs of equal tokens.
    for rollout, said in enumerate(log_probs):
        begun = log_probs[rollout - rollout % INTERVAL]
        assert said["past-b"] == begun["b"] and said["first-b"] == log_probs[0]["b"]
        assert said["a"] != said["b"]
        assert rollout % INTERVAL == 0 or said["past-b"] != said["b"]
    assert log_probs[2]["past-b"] != log_probs[0]["past-b"]
    # Each trainer has the samples of its own policy and no others: the first step is on policy.
    for policy in "ab":
        rows = run.rows("train").values()
        gaps = [row[f"train/{policy}/train_rollout_logprob_abs_diff"] for row in rows]
        assert len(gaps) == ROLLOUTS and max(gaps) < 1e-4
        assert all(row[f"train/{policy}/grad_norm"] > 0 for row in rows)
    run.expect_no_processes()


def _by_weights(samples: list[Sample]) -> dict[str, Any]:
    """What everybody made of the first prompt of a rollout; engines of one kind agree to the last bit."""
    (probes,) = [s.metadata["probes"] for s in samples if s.label == "letter"][:1]
    return {name: (tuple(tokens), tuple(values)) for name, (tokens, values) in probes.items()}
