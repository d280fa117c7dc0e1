"""Whole runs whose engines are SGLang's own servers, computing on the CPU."""

import json
import os
from pathlib import Path

import pytest

from tests.sglang_cpu.plugins import VICTIM, schedulers

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif("SGLANG_USE_CPU_ENGINE" not in os.environ, reason="run by scripts/test-sglang.sh"),
]

ON_CPU = [
    *("--rollout-engine", "sglang", "--sglang-device", "cpu", "--sglang-attention-backend", "torch_native"),
    *("--sglang-sampling-backend", "pytorch", "--sglang-disable-overlap-schedule", "--sglang-sleep-on-idle"),
    *("--sglang-mem-fraction-static", 0.9, "--sglang-max-total-tokens", 16384, "--sglang-disable-cuda-graph"),
    *("--engine-startup-timeout", 300),
]
LAYOUTS = {
    "disaggregated": [],
    "disaggregated PP 2, two engines": [
        *("--actor-num-gpus-per-node", 2, "--pipeline-model-parallel-size", 2, "--rollout-num-gpus", 2),
    ],
    "colocated": ["--colocate"],
    "colocated TP 2, two engines": [
        *("--colocate", "--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 2),
        *("--tensor-model-parallel-size", 2, "--rollout-top-p", 0.9),
        *("--update-weight-transport", "shards", "--check-weight-checksums"),
    ],
    "changes over a directory": [
        *("--update-weight-mode", "delta", "--update-weight-transport", "disk"),
        *("--update-weight-disk-dir", "{}/versions", "--update-weight-local-checkpoint-dir", "{}/local"),
    ],
    "adapters": ["--lora-rank", 8, "--lr", 1e-2],
    "adapters beside the base": [
        *("--lora-rank", 8, "--lr", 1e-2, "--no-lora-merge", "--sglang-lora-backend", "torch_native"),
    ],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_grpo_runs_and_trainer_and_engine_agree(
    layout: str, start, rl_flags, tmp_path: Path, record_property
) -> None:
    own = [str(word).format(tmp_path) for word in LAYOUTS[layout]]
    run = start([*rl_flags, *ON_CPU, *own, "--num-rollout", 3]).expect_success(timeout=600)
    rows = run.rows("train")
    assert sorted(rows) == [0, 1, 2]
    gap = max(row["train/train_rollout_logprob_abs_diff"] for row in rows.values())
    record_property("kind", f"GRPO, {layout}")
    record_property("gap", gap)
    assert gap < 1e-5
    run.expect_no_processes()


@pytest.mark.parametrize("trainer", ["megatron", "fsdp"])
def test_several_adapters_are_each_those_of_the_trainer(
    trainer: str, start, rl_flags, data: Path, tmp_path: Path, record_property
) -> None:
    names = ["one", "two", "three"]
    rows = [json.loads(line) for line in (data / "rl.jsonl").read_text().splitlines()]
    named = [
        {**row, "metadata": {"lora_adapter": names[number % 3]}}
        for number, row in enumerate(rows + rows + rows)
    ]
    (tmp_path / "named.jsonl").write_text("".join(json.dumps(row) + "\n" for row in named))
    flags = [
        *("--prompt-data", tmp_path / "named.jsonl", "--train-backend", trainer),
        *("--lora-rank", 8, "--lr", 1e-2),
        *("--lora-adapters", *names, "--no-lora-merge", "--sglang-lora-backend", "torch_native"),
        *("--num-rollout", 3, "--served-policy-bound", 1e-5),
    ]
    run = start([*rl_flags, *ON_CPU, *flags]).expect_success(timeout=600)
    gaps = [
        row[f"train/adapter/{name}/train_rollout_logprob_abs_diff"]
        for row in run.rows("train").values()
        for name in names
        if f"train/adapter/{name}/loss" in row
    ]
    record_property("kind", f"GRPO, several adapters beside the base, {trainer}")
    record_property("gap", max(gaps))
    assert len(run.rows("train")) == 3 and len(gaps) >= 6 and max(gaps) < 1e-5
    run.expect_no_processes()


@pytest.mark.parametrize(
    "layout",
    [[], ["--colocate", "--actor-num-gpus-per-node", 2]],
    ids=["disaggregated", "colocated"],
)
def test_an_engine_whose_scheduler_dies_in_an_update_is_replaced(
    layout: list[object],
    start,
    rl_flags,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    note = tmp_path / "victim"
    monkeypatch.setenv(VICTIM, str(note))
    flags = [
        *("--use-fault-tolerance", "--rollout-num-gpus", 2, "--num-rollout", 5),
        *("--custom-megatron-init-path", "tests.sglang_cpu.plugins.kill_a_scheduler_in_the_second_update"),
        *("--update-weight-buffer-size", 100_000),
    ]
    run = start([*rl_flags, *ON_CPU, *flags, *layout])
    run.wait_for(note.exists, "the death of a scheduler", timeout=300)
    run.wait_for(lambda: len(run.rows("train")) >= 3, "training after it", timeout=300)
    assert len(schedulers()) == 2
    assert int(note.read_text()) not in schedulers()
    run.expect_success(timeout=300)
    assert len(run.rows("train")) == 5
    run.expect_no_processes()
