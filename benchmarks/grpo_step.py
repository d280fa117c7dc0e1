"""Where the time of one GRPO step goes, end to end on a real colocated run.

    python benchmarks/grpo_step.py [--sizes 0.5M 10M] [--steps 4]

256 samples of up to 64 new tokens per step. Prints and writes JSON: the seconds of rollout, log-probs,
training, weight sync and of everything else ("rest": Ray, conversion, offload, logging), the rest's
share of the step (target at 10M: below 0.15), and the CPU seconds of a step by kind of process: trainer,
engine, and all others (driver, rollout manager, router, Ray's own).
The first step warms up and is left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "grpo_step.json"

# hidden size, layers, FFN size, heads, vocabulary
SIZES = {"0.5M": (128, 3, 256, 4, 320), "10M": (320, 8, 1024, 8, 320)}
PARTS = {
    "rollout": "perf/rollout_time",
    "log_probs": "perf/log_probs_time",
    "train": "perf/actor_train_time",
    "sync": "perf/update_weights_time",
}


def make_model(directory: Path, size: str) -> None:
    hidden, layers, ffn, heads, vocab = SIZES[size]
    command = [
        "tools/make_tiny_model.py",
        "--output",
        directory,
        "--hidden-size",
        hidden,
        "--num-layers",
        layers,
    ]
    command += ["--intermediate-size", ffn, "--num-heads", heads, "--vocab-size", vocab]
    subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True)


def kind_of(process: psutil.Process) -> str:
    """``trainer``, ``engine`` or ``others``, by what the process calls itself."""
    title = " ".join(process.cmdline())
    if "TrainRayActor" in title:
        return "trainer"
    return "engine" if "embedded_engine" in title else "others"


class CpuClock:
    """CPU seconds (user + system) of a run's processes, by kind; those of ended ones are kept.

    Attributes:
        is_late: whether a trainer or an engine of the reading before was gone at the last one.
    """

    def __init__(self, driver: int) -> None:
        self._driver = psutil.Process(driver)
        self._seen: dict[int, tuple[str, float]] = {}
        self._working: set[int] = set()
        self.is_late = False

    def read(self) -> Counter[str]:
        before, self._working = self._working, set()
        for process in [self._driver, *self._driver.children(recursive=True)]:
            try:
                times = process.cpu_times()
                kind = kind_of(process)
                self._seen[process.pid] = kind, times.user + times.system
                self._working |= {process.pid} if kind != "others" else set()
            except psutil.Error:  # it has ended since it was listed
                continue
        self.is_late = bool(before - self._working)
        total: Counter[str] = Counter()
        for kind, seconds in self._seen.values():
            total[kind] += seconds
        return total


def steps_ended(metrics: Path) -> int:
    return metrics.read_text().count('"perf/step_time"') if metrics.is_file() else 0


def watch_steps(run: subprocess.Popen[bytes], metrics: Path) -> list[Counter[str]]:
    """The CPU clock at the end of each step; not of the last one, if the run ends before it is read."""
    clock, readings = CpuClock(run.pid), []
    while run.poll() is None:
        if steps_ended(metrics) > len(readings):
            reading = clock.read()
            if clock.is_late:
                break
            readings.append(reading)
        time.sleep(0.05)
    return readings


def cpu_per_step(readings: list[Counter[str]]) -> dict[str, float]:
    """Median CPU seconds between two ends of steps."""
    kinds = ("trainer", "engine", "others")
    pairs = list(pairwise(readings))
    return {kind: statistics.median(after[kind] - before[kind] for before, after in pairs) for kind in kinds}


def run_steps(
    model: Path,
    prompts: Path,
    steps: int,
    metrics: Path,
    ranks: int = 1,
    reference: bool = True,
    flags: Sequence[object] = (),
) -> dict[str, float]:
    """Runs the steps, and returns the CPU seconds of one.

    Args:
        ranks: trainer processes, and engines beside them.
        reference: whether a step has a pass over a reference model.
        flags: of the run, beside its own.
    """
    words = [
        *flags,
        *(
            "--hf-checkpoint",
            model,
            "--fp32",
            "--colocate",
            "--prompt-data",
            prompts,
            "--num-gpus-per-node",
            ranks,
        ),
        *("--actor-num-gpus-per-node", ranks, "--rollout-num-gpus", ranks, "--num-rollout", steps + 1),
        *("--input-key", "prompt", "--label-key", "label", "--apply-chat-template"),
        *("--rm-type", "random", "--rollout-batch-size", 32, "--n-samples-per-prompt", 8),
        *("--rollout-max-response-len", 64, "--global-batch-size", 256, "--lr", 1e-5),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", 8192, "--metrics-file", metrics),
    ]
    if reference:
        words += ["--use-kl-loss", "--kl-loss-coef", 0.0, "--ref-load", model]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train.py", *map(str, words)]
    with subprocess.Popen(command, cwd=ROOT, env=env) as run:
        readings = watch_steps(run, metrics)
    if run.returncode:
        raise subprocess.CalledProcessError(run.returncode, command)
    return cpu_per_step(readings)


def read_steps(metrics: Path) -> list[dict[str, float]]:
    merged: dict[int, dict[str, float]] = {}
    for line in metrics.read_text().splitlines():
        row = json.loads(line)
        if row["axis"] == "rollout":
            merged.setdefault(row["step"], {}).update(row)
    return [merged[step] for step in sorted(merged)][1:]


def split(rows: list[dict[str, float]]) -> dict[str, float]:
    """Median seconds of each part, and the rest's share of the step."""
    total = statistics.median(row["perf/step_time"] for row in rows)
    parts = {name: statistics.median(row.get(key, 0.0) for row in rows) for name, key in PARTS.items()}
    ref = statistics.median(row.get("perf/ref_log_probs_time", 0.0) for row in rows)
    parts["log_probs"] += ref
    rest = total - sum(parts.values())
    length = statistics.median(row["rollout/response_len/mean"] for row in rows)
    return {**parts, "rest": rest, "step": total, "rest_share": rest / total, "response_len": length}


def write_prompts(path: Path) -> None:
    lines = [{"prompt": [{"role": "user", "content": f"{i}+{i}"}], "label": "0"} for i in range(10, 90)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def measure(size: str, steps: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        prompts = directory / "prompts.jsonl"
        write_prompts(prompts)
        make_model(directory / "model", size)
        cpu = run_steps(directory / "model", prompts, steps, directory / "metrics.jsonl")
        wall = split(read_steps(directory / "metrics.jsonl"))
        return {"wall_s": wall, "cpu_s": {**cpu, "step": sum(cpu.values())}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    results = {size: measure(size, options.steps) for size in options.sizes}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
