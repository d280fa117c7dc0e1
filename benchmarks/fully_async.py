"""Synchronous, asynchronous and fully async training on answers of uneven lengths: real runs, one after the
other.

    python benchmarks/fully_async.py [--size 0.5M] [--steps 8] [--rounds 1]

One trainer process and one embedded engine, so two cores. Each answer is as long as a draw from a log-normal
distribution says (median 24 tokens, at most 192), the same for every run: most of a batch waits for its
longest.

- ``sync``: train.py, engine and trainer in turns;
- ``async``: train_async.py, the next rollout while this one is trained on;
- ``fully_async``: train_async.py with slime.rollout.fully_async_rollout and ``--max-staleness 3``.

Writes samples per second of each, ratios to ``sync``, the part of a step in which the trainer waits, and how
many versions old the trained tokens were. The first two steps warm up and are left out.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.grpo_step import make_model, read_steps, write_prompts  # noqa: E402
from slime.rollout.sglang_rollout import generate  # noqa: E402
from slime.utils.types import Sample  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "fully_async.json"
SAMPLES = 64  # of a step
LONGEST = 192
WARM_UP = 2
FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
VARIANTS: dict[str, tuple[str, list[str]]] = {
    "sync": ("train.py", []),
    "async": ("train_async.py", []),
    "fully_async": ("train_async.py", ["--rollout-function-path", FULLY_ASYNC, "--max-staleness", "3"]),
}


async def generate_uneven(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The default generate function, with an own length for each sample."""
    length = min(LONGEST, round(random.Random(sample.index).lognormvariate(3.2, 0.9)) + 1)
    return await generate(args, sample, {**sampling_params, "max_new_tokens": length, "ignore_eos": True})


def run_variant(name: str, model: Path, prompts: Path, steps: int, metrics: Path) -> list[dict[str, float]]:
    """The metrics of the steps after the warm-up."""
    script, own = VARIANTS[name]
    flags = [
        *("--hf-checkpoint", model, "--fp32", "--prompt-data", prompts, "--num-gpus-per-node", 2),
        *("--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 1, "--num-rollout", steps + WARM_UP),
        *("--input-key", "prompt", "--label-key", "label", "--apply-chat-template", "--rm-type", "random"),
        *("--rollout-batch-size", SAMPLES // 4, "--n-samples-per-prompt", 4, "--global-batch-size", SAMPLES),
        *("--rollout-max-response-len", LONGEST, "--lr", 1e-5, "--use-dynamic-batch-size"),
        *("--max-tokens-per-gpu", 2048, "--use-rollout-logprobs", "--metrics-file", metrics),
        *("--custom-generate-function-path", "benchmarks.fully_async.generate_uneven", *own),
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, script, *map(str, flags)], cwd=ROOT, env=env, check=True)
    return read_steps(metrics)[WARM_UP - 1 :]


def figures(rows: list[dict[str, float]]) -> dict[str, float]:
    seconds = sum(row["perf/step_time"] for row in rows)
    return {
        "samples_per_s": SAMPLES * len(rows) / seconds,
        "wait_time_ratio": statistics.fmean(row["perf/wait_time_ratio"] for row in rows),
        "staleness_mean": statistics.fmean(row.get("rollout/staleness/mean", 0.0) for row in rows),
        "staleness_max": max(row.get("rollout/staleness/max", 0.0) for row in rows),
        "response_len_mean": statistics.fmean(row["rollout/response_len/mean"] for row in rows),
    }


def measure(size: str, steps: int, rounds: int) -> dict[str, Any]:
    """Medians over rounds; the variants take turns within a round."""
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write_prompts(directory / "prompts.jsonl")
        make_model(directory / "model", size)
        for number in range(rounds):
            for name in VARIANTS:
                metrics = directory / f"{name}-{number}.jsonl"
                rows = run_variant(name, directory / "model", directory / "prompts.jsonl", steps, metrics)
                seen[name].append(figures(rows))
    results: dict[str, Any] = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in seen.items()
    }
    base = results["sync"]["samples_per_s"]
    results["ratio"] = {name: results[name]["samples_per_s"] / base for name in ("async", "fully_async")}
    return {"size": size, "steps": steps, "rounds": rounds, "load": os.getloadavg()[2], **results}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=("0.5M", "10M"), default="0.5M")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    results = measure(options.size, options.steps, options.rounds)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
