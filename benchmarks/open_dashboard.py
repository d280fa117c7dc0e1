"""How long `slime dashboard` takes to open a long run: 100,000 steps, and 1 GB of recordings.

    python benchmarks/open_dashboard.py
    python benchmarks/open_dashboard.py --steps 1000 --gigabytes 0.01 --repeats 1

A run is written as runs write theirs: rows of metrics of each step, and files of a million tokens each. Each
repeat starts a server and asks for what the page asks for. Medians, in seconds:

    start     until the server answers, most of which are imports
    page      from the first request until all is there that the page shows first
    whole     until the curves are of the whole file: a long one is shown while it is read
    samples   until the samples of the last step, and one of them token by token, are there
    cpu       CPU seconds of the server for all that, and its start

The target is a page in less than two seconds.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.observing import SHOWN  # noqa: E402
from slime.observability.jsonl import JsonlWriter  # noqa: E402
from slime.observability.rollout_data_utils import save_debug_rollout_data  # noqa: E402
from slime.utils.types import Sample  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "open_dashboard.json"
SAMPLES, TOKENS = 256, 4096
DEADLINE_S = 300.0
_POLL_S = 0.02


def write_metrics(path: Path, steps: int) -> None:
    """Three rows a step, of 40 metrics."""
    writer = JsonlWriter(path)
    for step in range(steps):
        wave = 0.001 * (step % 97)
        rollout = {name: 1.0 + wave for name in SHOWN if name.startswith("rollout/")}
        rollout |= {f"rollout/measured/{number}": number + wave for number in range(15)}
        writer.write("rollout", step, {"rollout/step": step, **rollout})
        trained = {"train/loss": wave, "train/grad_norm": 1 + wave, "train/entropy_loss": 0.6}
        writer.write("train", step, {**trained, **{f"train/measured/{n}": n + wave for n in range(7)}})
        times = {"perf/rollout_time": 4.0, "perf/train_time": 4.0, "perf/log_probs_time": 1.0}
        times |= {f"perf/measured/{number}": number + wave for number in range(6)}
        writer.write("rollout", step, {**times, "perf/step_time": 10.0 + wave, "perf/wait_time_ratio": 0.4})
    writer.close()


def write_recordings(directory: Path, size: float) -> tuple[int, int]:
    """Files of the same samples until they have ``size`` bytes; returns how many, and their bytes."""
    samples = [
        Sample(
            group_index=number // 8,
            index=number,
            prompt="What is the answer?",
            tokens=[(number + place) % 50_000 for place in range(TOKENS)],
            response="the answer is 42 " * (TOKENS // 4),
            response_length=TOKENS - 64,
            label="42",
            reward=float(number % 2),
            rollout_log_probs=[-0.001 * place for place in range(TOKENS - 64)],
            version_spans=[("3", TOKENS - 64)],
            status=Sample.Status.COMPLETED,
        )
        for number in range(SAMPLES)
    ]
    template = str(directory / "rollout_data" / "{rollout_id}.pt")
    save_debug_rollout_data(template, samples, rollout_id=0, evaluation=False)
    first = Path(template.format(rollout_id=0))
    count = max(1, round(size / first.stat().st_size))
    for step in range(1, count):
        shutil.copyfile(first, template.format(rollout_id=step))
    return count, count * first.stat().st_size


def ask(address: str, path: str = "") -> Any:
    with urllib.request.urlopen(address + path, timeout=DEADLINE_S) as answer:
        content = answer.read()
    return json.loads(content) if path.startswith("api/") else content


def opened(directory: Path, last: int) -> dict[str, float]:
    """Starts a server, and asks as a page does that is opened."""
    place, began = directory / "dashboard.url", time.monotonic()
    place.unlink(missing_ok=True)
    command = [sys.executable, "-m", "slime.cli", "dashboard", str(directory), "--port", "0"]
    server = subprocess.Popen([*command, "--address-file", str(place)], cwd=ROOT)
    try:
        wait_until(place.is_file, server)
        address = place.read_text().strip()
        ask(address)  # it listens before it answers
        start, asked = time.monotonic() - began, time.monotonic()
        for path in ("page.css", "page.js"):
            ask(address, path)
        read = first_look(address)
        page = time.monotonic() - asked
        while read < 1:
            read = first_look(address)
        whole, asked = time.monotonic() - asked, time.monotonic()
        run = ask(address, "api/runs")[0]["name"]
        ask(address, f"api/samples?run={run}&step={last}")
        ask(address, f"api/sample?run={run}&step={last}&number=0")
        samples, times = time.monotonic() - asked, psutil.Process(server.pid).cpu_times()
    finally:
        server.kill()
        server.wait()
    return {
        "start": start,
        "page": page,
        "whole": whole,
        "samples": samples,
        "cpu": times.user + times.system,
    }


def first_look(address: str) -> float:
    """Asks for what the page shows first; returns how much of the metrics it is from."""
    read = float(ask(address, "api/runs")[0]["read"])
    for name in SHOWN:
        ask(address, f"api/curves?metric={name}")
    ask(address, "api/seconds")
    ask(address, "api/recordings")
    return read


def wait_until(holds: Any, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the dashboard does not answer (exit status {server.poll()})")
        time.sleep(_POLL_S)


def measure(steps: int, gigabytes: float, repeats: int) -> dict[str, Any]:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write_metrics(directory / "metrics.jsonl", steps)
        count, size = write_recordings(directory, gigabytes * 1e9)
        found = [opened(directory, count - 1) for _ in range(repeats)]
        metrics = (directory / "metrics.jsonl").stat().st_size
    return {
        "steps": steps,
        "metrics_bytes": metrics,
        "recordings": count,
        "recordings_bytes": size,
        "seconds": {name: round(statistics.median(one[name] for one in found), 3) for name in found[0]},
        "runs": found,
        "load_average": load,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of recordings")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    results = measure(options.steps, options.gigabytes, options.repeats)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
