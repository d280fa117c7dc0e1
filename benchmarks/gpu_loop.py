"""Colocated training on one GPU: where time and memory go, how fast weights move, how far log-probs differ.

    python benchmarks/gpu_loop.py --size 0.6B --engine embedded
    python benchmarks/gpu_loop.py --size 0.6B --engine sglang --steps 20 -- --sglang-mem-fraction-static 0.5

GRPO on a model with random weights, trainer and engine in turns on the same GPU, through ``train.py``
itself (`watched_train.py`). Prints and writes JSON, medians over the steps but the first, which warms up:

- `seconds` and `share` of the step of each call of the loop; `rest` is what is in none of them;
- `memory_gib` of the device before and after each call: what a hand-over releases and regains;
- `weight_sync`: bytes that the trainer handed over, per second of the whole update (pause, flush, buckets,
  continue), and in the rate of a copy of as many bytes within the device;
- `log_prob_gap`: mean absolute difference of the log-probs of trainer and engine, its median and its
  largest over all steps.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks" / "results" / "gpu" / "loop.json"
GAP = "train/train_rollout_logprob_abs_diff"
Row = dict[str, Any]


def flags(options: Namespace, directory: Path) -> list[object]:
    samples = options.prompts * options.samples
    return [
        *("--hf-checkpoint", directory / "model", "--colocate", "--num-gpus-per-node", 1, "--seed", 7),
        *("--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 1, "--rollout-engine", options.engine),
        *("--prompt-data", directory / "prompts.jsonl", "--input-key", "prompt", "--label-key", "label"),
        *("--apply-chat-template", "--rm-type", "random", "--num-rollout", options.steps + 1),
        *("--rollout-batch-size", options.prompts, "--n-samples-per-prompt", options.samples),
        *("--rollout-max-response-len", options.new_tokens, "--global-batch-size", samples),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", options.tokens, "--lr", 1e-6),
        *("--get-mismatch-metrics", "--metrics-file", directory / "metrics.jsonl"),
        "--bf16" if options.dtype == "bfloat16" else "--fp32",
        *options.flags,
    ]


def run_loop(options: Namespace, directory: Path) -> None:
    """
    Raises:
        subprocess.CalledProcessError: the run failed.
    """
    words = [directory / "calls.jsonl", *flags(options, directory)]
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    subprocess.run(
        [sys.executable, "benchmarks/watched_train.py", *map(str, words)], cwd=ROOT, env=env, check=True
    )


def rows_of(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_step(metrics: list[Row], axis: str) -> list[Row]:
    """Merged rows of each step, without the first."""
    merged: dict[int, Row] = {}
    for row in metrics:
        if row["axis"] == axis:
            merged.setdefault(row["step"], {}).update(row)
    return [merged[step] for step in sorted(merged)][1:]


def calls_of_steps(calls: list[Row]) -> list[list[Row]]:
    """The calls of each step from its rollout on; not those before the first, and not the first step."""
    steps: list[list[Row]] = []
    for row in calls:
        if row["call"] == "rollout.generate":
            steps.append([])
        if steps:
            steps[-1].append(row)
    return steps[1:]


def time_and_memory(calls: list[Row], steps: list[Row]) -> Row:
    found = calls_of_steps(calls)
    names = list(dict.fromkeys(row["call"] for step in found for row in step))

    def median(name: str, key: str) -> float:
        return statistics.median(row[key] for step in found for row in step if row["call"] == name)

    whole = statistics.median(row["perf/step_time"] for row in steps)
    seconds = {name: median(name, "seconds") for name in names}
    seconds["rest"] = whole - sum(seconds.values())
    memory = {name: {key: median(name, key) / 2**30 for key in ("before", "after")} for name in names}
    return {
        "step_s": whole,
        "seconds": seconds,
        "share": {name: value / whole for name, value in seconds.items()},
        "memory_gib": memory,
    }


def weight_sync(steps: list[Row]) -> Row:
    sent = statistics.median(row["perf/update_weights_wire_bytes"] for row in steps)
    seconds = statistics.median(row["perf/update_weights_time"] for row in steps)
    copy = copy_rate(int(sent))
    rate = sent / seconds
    return {
        "bytes": sent,
        "seconds": seconds,
        "gb_per_s": rate / 1e9,
        "device_copy_gb_per_s": copy / 1e9,
        "share_of_device_copy": rate / copy,
    }


def copy_rate(size: int, repeats: int = 5) -> float:
    """Bytes per second of the best copy of ``size`` bytes within the device."""
    from slime.utils.accelerator import local_device, synchronize

    source = torch.zeros(size, dtype=torch.uint8, device=local_device())
    target, best = torch.empty_like(source), 0.0
    for _ in range(repeats + 1):
        synchronize()
        started = time.perf_counter()
        target.copy_(source)
        synchronize()
        best = max(best, size / (time.perf_counter() - started))
    return best


def log_prob_gap(metrics: list[Row]) -> Row:
    gaps = [row[GAP] for row in metrics if GAP in row]
    return {"median": statistics.median(gaps), "largest": max(gaps)}


def write_prompts(path: Path, count: int) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{i}+{i}"}], "label": str(2 * i)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure(options: Namespace) -> Row:
    from benchmarks.qwen3_shapes import DTYPES, make_checkpoint

    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        make_checkpoint(directory / "model", options.size, DTYPES[options.dtype])
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        write_prompts(directory / "prompts.jsonl", max(options.prompts, 64))
        run_loop(options, directory)
        metrics = rows_of(directory / "metrics.jsonl")
        steps = by_step(metrics, "rollout")
        return {
            "size": options.size,
            "dtype": options.dtype,
            "engine": options.engine,
            "steps": len(steps),
            "samples_per_step": options.prompts * options.samples,
            "new_tokens": options.new_tokens,
            "torch": torch.__version__,
            **time_and_memory(rows_of(directory / "calls.jsonl"), steps),
            "weight_sync": weight_sync(steps),
            "log_prob_gap": log_prob_gap(metrics),
        }


def parse() -> Namespace:
    from benchmarks.qwen3_shapes import DTYPES, SHAPES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--size", choices=SHAPES, default="0.6B", help="shape of the model")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--engine", choices=("auto", "embedded", "sglang"), default="auto")
    parser.add_argument("--steps", type=int, default=4, help="that are measured")
    parser.add_argument("--prompts", type=int, default=16, help="of a step")
    parser.add_argument("--samples", type=int, default=8, help="for each prompt")
    parser.add_argument("--new-tokens", type=int, default=256, help="of a sample")
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch at most")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("flags", nargs="*", help="more flags of train.py, after --")
    return parser.parse_args()


def main() -> None:
    from benchmarks.qwen3_shapes import device_name

    options = parse()
    report = measure(options)
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    results.setdefault(device_name(), {})[f"{options.size}, {options.dtype}, {options.engine}"] = report
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
