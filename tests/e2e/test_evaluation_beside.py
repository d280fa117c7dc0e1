"""Evaluations on engines of their own, while training goes on."""

from pathlib import Path

import pytest
import torch
import yaml

from slime.utils.types import Sample

pytestmark = pytest.mark.e2e

ROLLOUTS = 4


@pytest.fixture
def flags(rl_flags, data: Path, tmp_path: Path) -> list[object]:
    dataset = {
        "name": "sums",
        "path": str(data / "eval.jsonl"),
        "custom_rm_path": "tests.e2e.plugins.waiting_reward",
    }
    (tmp_path / "eval.yaml").write_text(yaml.safe_dump({"eval": {"datasets": [dataset]}}))
    return [
        *(*rl_flags, "--num-rollout", ROLLOUTS, "--lr", 1e-3),
        *("--eval-config", tmp_path / "eval.yaml", "--eval-interval", 2, "--skip-eval-before-train"),
    ]


def weights_of(recording: Path) -> set[str]:
    samples = [Sample.from_dict(s) for s in torch.load(recording, weights_only=True)["samples"]]
    assert samples
    return {version for sample in samples for version in sample.weight_versions}


def test_training_goes_on_while_a_version_is_evaluated(start, flags, gate, tmp_path: Path) -> None:
    engines = [{"worker_type": "regular", "num_gpus": 1}]
    models = [{"name": name, "server_groups": engines} for name in ("policy", "judged")]
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump({"sglang": models}))
    opened = gate(0)
    beside = [
        *("--sglang-config", tmp_path / "fleet.yaml", "--rollout-num-gpus", 2, "--eval-model", "judged"),
        *("--save-debug-rollout-data", tmp_path / "{rollout_id}.pt"),
    ]
    run = start([*flags, *beside])
    # Rollout 3 is made and trained on by later weights, while those after two rollouts are evaluated.
    run.wait_for(lambda: "rollout/raw_reward" in run.rows("rollout").get(3, {}), "rollout 3")
    assert not run.rows("eval")
    opened.touch()
    run.expect_success()
    assert [*run.rows("eval")] == [2, 4]
    assert [weights_of(tmp_path / f"eval_{number}.pt") for number in (2, 4)] == [{"3"}, {"5"}]
    assert weights_of(tmp_path / "3.pt") == {"4"}
    assert run.rows("rollout")[3]["fleet/judged/weight_version"] == 3
    run.expect_no_processes()

    twin = start(flags).expect_success()
    numbers = [{number: row["eval/sums"] for number, row in one.rows("eval").items()} for one in (run, twin)]
    assert numbers[0] == numbers[1]
