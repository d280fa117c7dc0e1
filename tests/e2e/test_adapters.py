"""Two adapters on one base learn two tasks in one run, each of which undoes the other."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.e2e

NAMES = ["even", "odd"]
ROLLOUTS = 5
TRAINERS = [
    [],
    pytest.param(
        ["--train-backend", "fsdp", "--colocate", "--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 2],
        marks=pytest.mark.nightly,
    ),
]


@pytest.fixture
def tasks(tmp_path: Path, data: Path) -> list[object]:
    """Flags of the data: every prompt is one of both tasks, and for evaluations each with both adapters."""
    prompts = [json.loads(line)["prompt"] for line in (data / "rl.jsonl").read_text().splitlines()]
    rows = [
        {"prompt": prompt, "label": "", "metadata": {"task": name, "lora_adapter": name}}
        for prompt in prompts
        for name in NAMES
    ]
    (tmp_path / "both.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:16:2]))
    sets = [
        {
            **{"name": f"{task}_by_{adapter}", "path": str(tmp_path / "prompts.jsonl")},
            "metadata_overrides": {"task": task, "lora_adapter": adapter},
        }
        for task in NAMES
        for adapter in NAMES
    ]
    (tmp_path / "eval.yaml").write_text(yaml.safe_dump({"eval": {"datasets": sets}}))
    return ["--prompt-data", tmp_path / "both.jsonl", "--eval-config", tmp_path / "eval.yaml"]


@pytest.fixture
def base(model: Path, tmp_path: Path) -> Path:
    """Makes a model whose layers decide what it says: a random one has next to no logits."""
    path = tmp_path / "base"
    shutil.copytree(model, path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] *= 8
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("trainer", TRAINERS, ids=["Megatron", "FSDP, colocated"])
def test_each_learns_its_own_task(trainer, start, rl_flags, base, tasks, tmp_path) -> None:
    run = start(
        [
            *(
                *rl_flags,
                "--hf-checkpoint",
                base,
                *tasks,
                "--custom-rm-path",
                "tests.e2e.plugins.own_task_reward",
            ),
            *trainer,
            *("--lora-rank", 8, "--lora-adapters", *NAMES, "--no-lora-merge", "--lr", 1e-2),
            *("--num-rollout", ROLLOUTS, "--rollout-batch-size", 8, "--n-samples-per-prompt", 8),
            *("--global-batch-size", 64, "--eval-interval", ROLLOUTS, "--served-policy-bound", 1e-5),
            *("--save", tmp_path / "save", "--save-interval", ROLLOUTS, "--save-hf", tmp_path / "hf"),
            *("--ci-test", "--ci-train-rollout-logprob-abs-diff-threshold", 1e-5),
        ]
    ).expect_success()
    rollouts, steps, evals = (run.rows(axis) for axis in ("rollout", "train", "eval"))
    for name in NAMES:
        rewards = [rollouts[number][f"rollout/adapter/{name}/raw_reward"] for number in range(ROLLOUTS)]
        assert rewards[-1] > 0.9 > rewards[0], rewards
        assert all(f"train/adapter/{name}/loss" in step for step in steps.values())
        assert evals[ROLLOUTS][f"eval/{name}_by_{name}"] > 0.9
        assert evals[ROLLOUTS][f"eval/{_other(name)}_by_{name}"] < 0.1
    even, odd = (load_file(tmp_path / "hf" / name / "adapter_model.safetensors") for name in NAMES)
    assert even.keys() == odd.keys() and all((even[key] != odd[key]).any() for key in even)
    run.expect_no_processes()


def _other(name: str) -> str:
    return NAMES[name == NAMES[0]]
