"""Where the time of a start goes: ``python train.py`` on the tiny model, and a flag that is misspelt.

    python benchmarks/startup.py [--rounds 3]

Seconds since the command line was entered, medians over rounds, until

- the arguments are checked, Ray is up, and the rollout manager, the engines and the trainers are ready (parts
  that start side by side; of several trainers the last one);
- the engines have their first weights, the first rollout and the first step are done;
- no process of the run is left.

Of a misspelt flag also the seconds of CPU.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from examples.calculator_tool.make_data import main as make_data  # noqa: E402
from slime.observability.startup import TIMES_FILE  # noqa: E402
from tools.make_tiny_model import main as make_tiny_model  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "startup.json"
TAG = "SLIME_BENCHMARK_RUN"
PARTS = (
    *("arguments checked", "Ray up", "rollout manager ready", "engines ready", "trainers ready"),
    *("first weights sent", "first rollout done", "first step done", "processes gone"),
)
LONGEST = 120.0  # seconds for processes to end after their driver


def flags(directory: Path) -> list[str]:
    """A GRPO run of one rollout: 4 prompts with 4 samples each, one trainer and one engine."""
    words: list[object] = [
        *("--hf-checkpoint", directory / "model", "--fp32", "--num-gpus-per-node", 8, "--num-rollout", 1),
        *("--prompt-data", directory / "data" / "rl.jsonl", "--input-key", "prompt", "--label-key", "label"),
        *("--apply-chat-template", "--rollout-max-response-len", 12, "--rm-type", "random"),
        *("--rollout-batch-size", 4, "--n-samples-per-prompt", 4, "--global-batch-size", 16),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", 512, "--lr", 1e-4),
        *("--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 1),
    ]
    return list(map(str, words))


def measure_run(directory: Path, number: int) -> dict[str, float]:
    """Seconds from the command line to the end of each part."""
    times, metrics = directory / f"times-{number}.jsonl", directory / f"metrics-{number}.jsonl"
    tag = uuid.uuid4().hex
    env = os.environ | {TIMES_FILE: str(times), TAG: tag, "OMP_NUM_THREADS": "1"}
    env.pop("RAY_ADDRESS", None)
    start = time.time()
    command = [sys.executable, "train.py", *flags(directory), "--metrics-file", str(metrics)]
    said = directory / f"said-{number}"
    with said.open("w") as output:
        status = subprocess.run(command, cwd=ROOT, env=env, stdout=output, stderr=output).returncode
    if status:
        raise RuntimeError(f"{' '.join(command)}: exit status {status}\n{said.read_text()[-4000:]}")
    _await_end(tag)
    ended = {"processes gone": time.time()}
    for row in _rows(times):
        later = max if row["part"] == "trainers ready" else min
        ended[row["part"]] = later(row["time"], ended.get(row["part"], row["time"]))
    rollouts = [row for row in _rows(metrics) if row["axis"] == "rollout"]
    ended["first rollout done"] = rollouts[0]["time"]
    ended["first step done"] = next(row["time"] for row in rollouts if "perf/step_time" in row)
    return {part: ended[part] - start for part in PARTS}


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _await_end(tag: str) -> None:
    """Returns when no process has this run's mark in its environment."""
    deadline = time.monotonic() + LONGEST
    while left := _processes(tag):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {left} are left {LONGEST:g} s after the run")
        time.sleep(0.05)


def _processes(tag: str) -> list[int]:
    mark, found = f"{TAG}={tag}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def measure_wrong_flag() -> dict[str, float]:
    """Wall and CPU seconds until a misspelt flag is answered."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "train.py", "--no-such-flag"]
    status = subprocess.run(command, cwd=ROOT, stderr=subprocess.DEVNULL).returncode
    if status != 2:
        raise RuntimeError(f"{' '.join(command)}: exit status {status} (wanted: 2)")
    seconds, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": seconds, "cpu_s": cpu}


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(run[name] for run in runs), 2) for name in runs[0]}


def measure(rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        make_tiny_model(["--output", str(directory / "model"), "--hidden-size", "64", "--num-layers", "2"])
        rows = ["--sft-rows", "4", "--rl-rows", "64", "--eval-rows", "4"]
        make_data(["--output", str(directory / "data"), *rows])
        load = os.getloadavg()[0]
        wrong = _medians([measure_wrong_flag() for _ in range(rounds)])
        parts = _medians([measure_run(directory, number) for number in range(rounds)])
    return {"rounds": rounds, "load_before": load, "wrong_flag": wrong, "seconds_until": parts}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    results = measure(options.rounds)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
