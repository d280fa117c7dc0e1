"""The loop on every layout, with every process real."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest

from slime.weight_sync.versions.board import Board
from slime.weight_sync.versions.manifest import directory_of
from tests.e2e.test_resume import numbers
from tests.otlp_collector import Collector
from tools.make_tiny_model import main as make_tiny_model

pytestmark = pytest.mark.e2e

LAYOUTS = {
    "colocated": ["--colocate"],
    "colocated DP 2, two engines, nuclei": [
        *("--colocate", "--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 2, "--use-kl-loss"),
        *("--kl-loss-coef", 0.1, "--kl-loss-type", "k3", "--rollout-top-p", 0.9),
    ],
    "colocated TP 2 with SP, an engine of two ranks": [
        *("--colocate", "--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 2),
        *("--rollout-num-gpus-per-engine", 2),
        *("--tensor-model-parallel-size", 2, "--sequence-parallel"),
        *("--update-weight-transport", "shards", "--check-weight-checksums"),
    ],
    "TP 2, an engine of two ranks elsewhere, from rank to rank": [
        *("--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 2, "--rollout-num-gpus-per-engine", 2),
        *("--tensor-model-parallel-size", 2, "--sequence-parallel"),
        *("--update-weight-transport", "shards", "--check-weight-checksums"),
    ],
    "colocated TP 2, adapters, one engine": [
        *("--colocate", "--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 1),
        *("--tensor-model-parallel-size", 2, "--lora-rank", 8, "--lr", 1e-2),
    ],
    "colocated CP 2, one engine, nuclei": [
        *("--colocate", "--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 1),
        *("--context-parallel-size", 2, "--rollout-top-p", 0.9),
    ],
}
CHECKS = [
    *("--ci-test", "--check-weight-update-equal", "--served-policy-bound", 1e-5),
    *("--ci-train-rollout-logprob-abs-diff-threshold", 1e-5),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_grpo_runs_and_trainer_and_engine_agree(layout: str, start, rl_flags, model) -> None:
    extra = ["--ref-load", model] if "--use-kl-loss" in LAYOUTS[layout] else []
    run = start([*rl_flags, *LAYOUTS[layout], *extra, *CHECKS]).expect_success()
    _expect_agreement(run)
    run.expect_no_processes()


BESIDE_THE_BASE = {
    "colocated": ["--colocate"],
    "disaggregated": [],
}


@pytest.mark.nightly
@pytest.mark.parametrize("layout", BESIDE_THE_BASE)
def test_engines_that_compute_adapters_beside_the_base_agree_and_are_sent_little(
    layout: str, start, rl_flags
) -> None:
    lora = ["--lora-rank", 4, "--lr", 1e-2, "--no-lora-merge", "--check-weight-checksums"]
    run = start([*rl_flags, *BESIDE_THE_BASE[layout], *lora, *CHECKS]).expect_success()
    _expect_agreement(run)
    first, second = (run.rows("rollout")[number] for number in (0, 1))
    whole, adapters = first["perf/update_weights_wire_bytes"], second["perf/update_weights_wire_bytes"]
    assert 0 < adapters < whole / 2
    assert second["perf/update_weights_density"] == pytest.approx(adapters / whole, rel=1)
    run.expect_no_processes()


def test_virtual_stages_send_their_weights_to_two_engines_save_and_resume(
    start, rl_flags, tmp_path: Path
) -> None:
    """Disaggregated, with PP 2; the second step is taken again, from the first one's checkpoint."""
    model = _tiny_model_of_four_layers(tmp_path / "model")
    saved, recording = tmp_path / "saved", f"{tmp_path}/recorded/{{rollout_id}}.pt"
    stages = ["--pipeline-model-parallel-size", 2, "--num-virtual-stages-per-pipeline-rank", 2]
    flags = [*rl_flags, "--hf-checkpoint", model, *stages, "--actor-num-gpus-per-node", 2]
    saving = ["--save", saved, "--save-interval", 1, "--save-debug-rollout-data", recording]
    run = start([*flags, "--rollout-num-gpus", 2, *saving, *CHECKS]).expect_success()
    _expect_agreement(run)
    run.expect_no_processes()
    again = start([*flags, "--load", saved, "--ckpt-step", 0, "--load-debug-rollout-data", recording])
    resumed = numbers(again.expect_success().rows("train"))
    assert resumed == {1: numbers(run.rows("train"))[1]}


def _tiny_model_of_four_layers(path: Path) -> Path:
    make_tiny_model(["--output", str(path), "--hidden-size", "64", "--num-layers", "4"])
    return path


def _expect_agreement(run) -> None:
    steps = run.rows("train")
    assert sorted(steps) == [0, 1]
    for step in steps.values():
        assert step["train/ppo_kl"] == pytest.approx(0, abs=1e-8)
        assert step["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert 0 < step["train/grad_norm"] < math.inf
    assert _ages(run) == [(0, 0), (0, 0)]
    assert run.written_twice() == set()


def test_async_training_is_one_rollout_ahead(start, rl_flags, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    flags = ["--num-rollout", 3, "--trace", trace, "--update-weight-transport", "disk"]
    flags += ["--update-weight-disk-dir", f"file://{tmp_path}/versions", "--update-weight-mode", "delta"]
    flags += ["--update-weight-local-checkpoint-dir", tmp_path / "local"]
    with Collector() as collector:
        flags += ["--otlp-endpoint", collector.url, "--run-name", "ahead"]
        run = start([*rl_flags, *flags], script="train_async.py").expect_success()
    assert sorted(run.rows("train")) == [0, 1, 2]
    for place in ("versions/trainer_000001_*", "local"):  # what has changed, and the checkpoint made of it
        assert max(path.name for path in tmp_path.glob(f"{place}/weight*")) == "weight_v000004"
    assert all(0 < row["perf/update_weights_density"] < 1 for row in run.rows("rollout").values())
    assert run.rows("train")[0]["train/train_rollout_logprob_abs_diff"] < 1e-5
    assert _ages(run) == [(0, 0), (1, 1), (1, 1)]
    assert all(row["perf/update_weights_pause_time"] > 0 for row in run.rows("rollout").values())
    assert "\nweight sync: " in run.output
    assert "note: train_async.py: tokens are older than the weights they train, and nothing" in run.output
    run.expect_no_processes()
    _expect_overlap(trace)
    _expect_in_traces(collector, trace)


def _expect_overlap(trace: Path) -> None:
    """Expects that the second rollout overlaps with the trainer's work on the first one, by the trace."""
    events = json.loads(trace.read_text().rstrip().rstrip(",") + "]")
    processes = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert set(processes.values()) == {"driver", "rollouts", "actor rank 0"}
    spans = [(processes[event["pid"]], event["name"], event) for event in events if event["ph"] == "X"]
    rollouts = {
        e["args"]["rollout"]: e for process, name, e in spans if (process, name) == ("rollouts", "rollout")
    }
    trained = [e for process, name, e in spans if (process, name) == ("actor rank 0", "actor_train")]
    assert sorted(rollouts) == [0, 1, 2] and len(trained) == 3
    assert rollouts[1]["ts"] < trained[0]["ts"] + trained[0]["dur"]
    assert trained[0]["ts"] >= rollouts[0]["ts"] + rollouts[0]["dur"]
    names = {name for _, name, _ in spans}
    assert names >= {"generate", "sglang_generate", "reward_model", "update_weights", "train_wait", "step"}
    assert names >= {"data_preprocess", "advantages", "optimizer_step", "actor_train"}
    # Of what comes after the last training, too.
    updates = [e for process, name, e in spans if (process, name) == ("actor rank 0", "update_weights")]
    assert len(updates) == 4 and updates[-1]["ts"] > trained[-1]["ts"]


def _expect_in_traces(collector: Collector, trace: Path) -> None:
    """Expects that a collector was sent what the file has, each step with a root of its own."""
    events = json.loads(trace.read_text().rstrip().rstrip(",") + "]")
    processes = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    written = Counter((processes[event["pid"]], event["name"]) for event in events if event["ph"] == "X")
    spans = collector.spans
    assert Counter((span.process, span.name) for span in spans) == written
    roots = {span.trace: span.name for span in spans if not span.parent}
    assert sorted(roots.values()) == ["end", "start", "step", "step", "step"]
    assert {span.trace for span in spans} <= roots.keys()
    assert {span.resource["slime_run"] for span in spans} == {"ahead"}
    rollouts = {span.id for span in spans if span.name == "rollout"}
    samples = [span for span in spans if span.name == "generate"]
    assert all(span.parent in rollouts and {"sample", "group"} <= span.attrs.keys() for span in samples)


def _ages(run) -> list[tuple[float, float]]:
    rows = run.rows("rollout")
    return [(rows[i]["rollout/staleness/mean"], rows[i]["rollout/staleness/max"]) for i in sorted(rows)]


def test_async_training_refuses_colocation(start, rl_flags) -> None:
    run = start([*rl_flags, "--colocate"], script="train_async.py")
    assert run.wait() == 2
    assert "--colocate" in run.output.splitlines()[-1]


def test_sft_needs_no_engine(start, rl_flags, data, tmp_path: Path) -> None:
    """It publishes what it trains, for engines of others."""
    sft = [
        *("--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout", "--debug-train-only"),
        *("--loss-type", "sft_loss", "--prompt-data", data / "sft.jsonl", "--input-key", "messages"),
        *("--disable-compute-advantages-and-returns", "--n-samples-per-prompt", 1, "--num-rollout", 3),
        *("--loss-mask-type", "qwen3", "--lr", 1e-3),
        # All rows in each step: else it may be other rows that are easier.
        *("--rollout-batch-size", 64, "--global-batch-size", 64),
        *("--publish-weights", "--update-weight-mode", "delta", "--update-weight-transport", "disk"),
        *("--update-weight-disk-dir", tmp_path / "versions"),
    ]
    flags = [f for f in rl_flags if f not in ("--apply-chat-template", "--label-key", "label")]
    run = start([*flags, *sft]).expect_success()
    losses = [step["train/loss"] for step in run.rows("train").values()]
    assert len(losses) == 3 and losses == sorted(losses, reverse=True)
    newest = Board(str(tmp_path / "versions")).newest()
    assert newest is not None and newest[1].version == 4
    assert directory_of(tmp_path / "versions", 4).is_dir()


def test_evaluation_only(start, rl_flags, data) -> None:
    flags = ["--num-rollout", 0, "--eval-interval", 1, "--eval-prompt-data", "calc", data / "eval.jsonl"]
    run = start([*rl_flags, "--colocate", *flags]).expect_success()
    assert 0 <= run.rows("eval")[0]["eval/calc"] <= 1
    assert not run.rows("train")


def test_recorded_rollouts_train_without_engines(start, rl_flags, tmp_path: Path) -> None:
    """Within the nuclei that were recorded; over the whole vocabulary the log-probs are others."""
    recording, nuclei = f"{tmp_path}/dump/{{rollout_id}}.pt", ["--rollout-top-p", 0.9, "--rollout-top-k", 200]
    recorder = [*rl_flags, *nuclei, "--debug-rollout-only", "--save-debug-rollout-data", recording]
    sampled = start(recorder).expect_success().rows("rollout")[0]
    assert 100 < sampled["rollout/top_p_kept_vocab_per_token"] <= 200
    assert (tmp_path / "dump/0.pt").exists() and (tmp_path / "dump/1.pt").exists()
    run = start([*rl_flags, *nuclei, "--load-debug-rollout-data", recording]).expect_success()
    assert run.rows("train")[0]["train/train_rollout_logprob_abs_diff"] < 1e-5
    without = start([*rl_flags, "--load-debug-rollout-data", recording, "--num-rollout", 1]).expect_success()
    assert without.rows("train")[0]["train/train_rollout_logprob_abs_diff"] > 0.1
