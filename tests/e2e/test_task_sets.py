"""Tasks of Harbor, and environments of verifiers, as the eval sets of a run that trains on something else."""

import importlib.util
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from slime.agent.harbor.__main__ import main as harbor
from slime.environments.verifiers_host import main as verifiers
from slime.utils.types import Sample
from tests.agent.containers import StandIn, has_namespaces
from tests.agent.harbor_tasks import PYTHON, make_task
from tests.e2e.task_sets import CONTAINERS
from tools.make_tiny_model import make_tokenizer

pytestmark = pytest.mark.e2e

KEPT = """#!/bin/sh
mkdir -p /logs/verifier
[ -e given ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""
WRITES_42 = 'open("answer", "w").write("42\\n" if said else "nothing was said")\n'


@pytest.fixture
def containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if not has_namespaces() or not shutil.which(PYTHON):
        pytest.skip(f"the stand-in for docker needs namespaces, its agent {PYTHON}")
    (tmp_path / "engine").mkdir()
    made = StandIn(tmp_path / "engine", monkeypatch)
    monkeypatch.setenv(CONTAINERS, str(made.folder))
    yield made
    assert not made.running
    made.remove_all()


@pytest.fixture
def evaluate(start, rl_flags, tmp_path: Path):
    """``evaluate({name: set})``: the row of an evaluation after a rollout, and its samples."""

    def run(sets: dict[str, dict[str, Any]]) -> tuple[dict[str, float], list[Sample]]:
        all_of_them = {"apply_chat_template": False, "label_key": None}
        datasets = [{"name": name, **all_of_them, **own} for name, own in sets.items()]
        (tmp_path / "eval.yaml").write_text(yaml.safe_dump({"eval": {"datasets": datasets}}))
        made = start(
            [
                *(*rl_flags, "--num-rollout", 1, "--eval-config", tmp_path / "eval.yaml"),
                *("--eval-interval", 1, "--skip-eval-before-train", "--n-samples-per-eval-prompt", 2),
                *("--save-debug-rollout-data", tmp_path / "{rollout_id}.pt"),
            ]
        ).expect_success()
        assert made.rows("train")[0]["train/grad_norm"] > 0
        made.expect_no_processes()
        recorded = torch.load(tmp_path / "eval_1.pt", weights_only=True)["samples"]
        return made.rows("eval")[1], [Sample.from_dict(sample) for sample in recorded]

    return run


def test_tasks_of_harbor_are_an_eval_set(evaluate, containers: StandIn, tmp_path: Path) -> None:
    for name, wanted in (("solved", "42"), ("unsolved", "43")):
        make_task(tmp_path / "tasks" / name, wanted=wanted, agent=WRITES_42)
    make_task(tmp_path / "kept/kept", tests=KEPT)
    rows = {}
    for name in ("tasks", "kept"):
        rows[name] = str(tmp_path / f"{name}.jsonl")
        assert harbor([str(tmp_path / name), "--rows", rows[name]]) == 0
    # A turn that is cut off is worth 0; so half of all tokens end it.
    ends = {"max_response_len": 64, "stop_token_ids": [*range(0, len(make_tokenizer()), 2)]}
    row, samples = evaluate(
        {
            "agents": {"path": rows["tasks"], "custom_generate_function_path": "tests.e2e.task_sets.works"},
            "shell": {
                **ends,
                "path": rows["kept"],
                "custom_generate_function_path": "tests.e2e.task_sets.shell",
            },
        }
    )
    assert (row["eval/agents"], row["eval/shell"]) == (0.5, 1.0)
    found = Counter((Path(sample.metadata["harbor"]).name, sample.reward) for sample in samples)
    assert found == {("solved", 1.0): 2, ("unsolved", 0.0): 2, ("kept", 1.0): 2}
    # What was said is the model's own, by the weights that were evaluated.
    assert all(sample.response_length and sample.weight_versions == ["2"] for sample in samples)
    assert [words[0] for words in containers.calls].count("run") == 2 * len(samples)


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed")
def test_an_environment_of_verifiers_is_an_eval_set(evaluate, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    verifiers(["tests.environments.verifiers_games", "--rows", str(path), "--eval"])
    own = {"path": str(path), "custom_generate_function_path": "tests.e2e.task_sets.plays"}
    row, samples = evaluate({"shelves": own})
    assert row["eval/shelves"] == 0.5
    found = Counter((sample.metadata["verifiers"]["info"]["shelf"], sample.reward) for sample in samples)
    assert found == {("a", 1.0): 2, ("b", 0.0): 2}
    assert all(sample.response_length and sample.weight_versions == ["2"] for sample in samples)
