"""Whole runs through ``train.py``: every process, sampled tokens included.

    python -m tests.golden.runs outputs/golden/before           # in one checkout
    python -m tests.golden.runs outputs/golden/after            # in another, on the same machine
    python -m tests.golden.runs --compare outputs/golden/before outputs/golden/after

Everything but the clocks has to be equal, to the last bit. It takes some minutes; the suite holds the
trainer's part of it (test_curves.py).
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.golden.model import save_golden_model

ROOT = Path(__file__).parents[2]
VARYING = ("time", "_per_s", "perf/", "run_id")

COMMON = [
    *("--fp32", "--num-gpus-per-node", 8, "--seed", 7, "--rollout-seed", 5),
    *("--input-key", "prompt", "--label-key", "label", "--apply-chat-template", "--rollout-shuffle"),
    *("--rollout-max-response-len", 12, "--custom-rm-path", "tests.e2e.plugins.token_parity_reward"),
    *("--num-rollout", 3, "--rollout-batch-size", 4, "--n-samples-per-prompt", 4),
    *("--use-dynamic-batch-size", "--max-tokens-per-gpu", 256, "--advantage-estimator", "grpo"),
    *("--lr", 1e-3, "--lr-decay-style", "constant", "--weight-decay", 0.01, "--actor-num-gpus-per-node", 1),
    *("--rollout-num-gpus", 1, "--sglang-enable-deterministic-inference"),
]
SFT = [
    *("--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout", "--debug-train-only"),
    *("--loss-type", "sft_loss", "--input-key", "messages", "--disable-compute-advantages-and-returns"),
    *("--n-samples-per-prompt", 1, "--rollout-batch-size", 16, "--global-batch-size", 16),
    *("--loss-mask-type", "qwen3"),
]
RUNS: dict[str, tuple[str, list[object]]] = {
    "colocated": ("train.py", ["--colocate", "--global-batch-size", 8]),
    "colocated DP 2 with a reference": (
        "train.py",
        [
            *("--colocate", "--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 2),
            *("--use-kl-loss", "--kl-loss-coef", 0.1, "--kl-loss-type", "k3", "--global-batch-size", 16),
        ],
    ),
    "colocated TP 2 with SP": (
        "train.py",
        [
            *("--colocate", "--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 1, "--use-tis"),
            *("--tensor-model-parallel-size", 2, "--sequence-parallel", "--global-batch-size", 16),
        ],
    ),
    "disaggregated PP 2, two engines": (
        "train.py",
        [
            *("--actor-num-gpus-per-node", 2, "--pipeline-model-parallel-size", 2, "--rollout-num-gpus", 2),
            *("--global-batch-size", 16),
        ],
    ),
    "asynchronous": ("train_async.py", ["--global-batch-size", 16, "--use-tis"]),
    "sft": ("train.py", SFT),
}


def run(output: Path) -> None:
    """Runs everything and writes ``output/<run>.json``."""
    output.mkdir(parents=True, exist_ok=True)
    model = save_golden_model(output / "model")
    data = output / "data"
    _call("examples/calculator_tool/make_data.py", "--output", data, "--sft-rows", 64, "--rl-rows", 64)
    for name, (script, flags) in RUNS.items():
        work = output / name.replace(" ", "_").replace(",", "")
        prompts = data / ("sft.jsonl" if name == "sft" else "rl.jsonl")
        common = [
            flag
            for flag in COMMON
            if name != "sft" or flag not in ("--apply-chat-template", "--label-key", "label")
        ]
        evaluation = (
            []
            if name == "sft"
            else [
                *("--eval-interval", 2, "--eval-prompt-data", "calc", f"{data}/eval.jsonl@[:8]"),
            ]
        )
        files = [
            *("--hf-checkpoint", model, "--prompt-data", prompts, "--metrics-file", work / "metrics.jsonl"),
            *("--dump-details", work / "dump"),
        ]
        _call(script, *common, *files, *evaluation, *flags)
        result = {
            "metrics": _metrics(work / "metrics.jsonl"),
            "samples": _samples(work / "dump" / "rollout_data"),
        }
        work.with_suffix(".json").write_text(json.dumps(result, indent=1, sort_keys=True))
        print(f"{name}: {len(result['metrics'])} rows, {len(result['samples'])} recordings", flush=True)


def _call(script: str, *arguments: object) -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script, *map(str, arguments)], cwd=ROOT, env=env, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{script} {arguments}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}")


def _metrics(path: Path) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        key = f"{row['axis']} {row['step']}"
        rows.setdefault(key, {}).update(
            {k: v for k, v in row.items() if not any(word in k for word in VARYING)}
        )
    return rows


def _samples(directory: Path) -> dict[str, str]:
    """Digest of the tokens, log-probs and rewards of every recording."""
    digests = {}
    for file in sorted(directory.glob("*.pt")):
        samples = torch.load(file, weights_only=True)["samples"]
        content = [(s["tokens"], s["rollout_log_probs"], s["loss_mask"], s["reward"]) for s in samples]
        digests[file.stem] = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return digests


def compare(before: Path, after: Path) -> int:
    """Prints what differs; the number of differences."""
    differences = 0
    names = {f.name for f in before.glob("*.json")} | {f.name for f in after.glob("*.json")}
    for name in sorted(names):
        left, right = (json.loads((side / name).read_text()) for side in (before, after))
        for part in left.keys() | right.keys():
            for key in sorted(left[part].keys() | right[part].keys()):
                if left[part].get(key) != right[part].get(key):
                    differences += 1
                    print(f"{name}: {part} {key}:\n  {left[part].get(key)}\n  {right[part].get(key)}")
    print(f"{len(names)} runs, {differences} differences")
    return differences


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", nargs="?", type=Path)
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    args = parser.parse_args(argv)
    if args.compare:
        raise SystemExit(bool(compare(*args.compare)))
    run(args.output.resolve())


if __name__ == "__main__":
    main()
