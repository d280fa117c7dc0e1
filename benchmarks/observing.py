"""What watching a run costs: a GRPO step with all of it over one without.

    python benchmarks/observing.py                              # 10M parameters, about five minutes
    python benchmarks/observing.py --size 0.5M --rounds 1

Runs take turns, one without and one with ``--trace``, ``--otlp-endpoint``, ``--dashboard`` (asked for what an
open page asks for, every 5 seconds), ``--prometheus-port`` (asked every 15 seconds), health checks and the
state that another rollout manager would go on from (``--use-fault-tolerance``), and recordings of rollouts.
The ledger is always kept: what it takes for the groups of a step is measured alone, and counted as watching.

A step is that of grpo_step.py without a reference, with two trainer processes and two engines, so that two
cores are busy and nobody watches for nothing. The first step of a run warms up and is left out. ``share`` is
what watching adds to a step without it:

    wall        seconds, medians over all steps; noisier than what is to be seen, unless the machine is idle
    cpu         CPU seconds of all processes
    cpu_others  CPU seconds that processes other than trainers and engines add, over those of a whole step:
                the steadiest, as hardly anything else happens in them

The target is below 0.01 at 10M parameters. Who asks runs in this process, and is not counted.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.grpo_step import SIZES, make_model, read_steps, run_steps, write_prompts  # noqa: E402
from slime.rollout.ledger import RolloutAccount  # noqa: E402
from slime.utils.addresses import find_available_port  # noqa: E402
from slime.utils.types import Sample  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "observing.json"
GROUPS, GROUP = 32, 8
PAGE_EVERY, SCRAPE_EVERY = 5.0, 15.0  # seconds
SHOWN = ("rollout/raw_reward", "train/loss", "train/grad_norm", "rollout/response_len/mean", "perf/step_time")


@contextmanager
def collector() -> Iterator[str]:
    """Takes spans and forgets them."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class Viewer:
    """Asks for the page of a run and for its metrics while it lasts, as a browser and Prometheus would."""

    def __init__(self, directory: Path, port: int) -> None:
        self._address, self._metrics = directory / "dashboard.url", f"http://127.0.0.1:{port}/metrics"
        self._ended = threading.Event()
        self.answers: dict[str, int] = {"page": 0, "metrics": 0}

    @contextmanager
    def watching(self) -> Iterator[None]:
        loops = ("page", PAGE_EVERY, self._page), ("metrics", SCRAPE_EVERY, self._scrape)
        threads = [threading.Thread(target=self._ask, args=loop, daemon=True) for loop in loops]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ended.set()
            for thread in threads:
                thread.join(60)

    def _ask(self, name: str, seconds: float, urls: Any) -> None:
        while not self._ended.wait(seconds):
            try:
                for url in urls():
                    with urllib.request.urlopen(url, timeout=30) as answer:
                        answer.read()
                self.answers[name] += 1
            except OSError:  # not there yet, or no more
                continue

    def _page(self) -> list[str]:
        api = self._address.read_text().strip() + "api/"
        return [api + "runs", *(f"{api}curves?metric={name}" for name in SHOWN), api + "seconds"]

    def _scrape(self) -> list[str]:
        return [self._metrics]


class Prompts:
    """A data source that has its groups made."""

    def __init__(self) -> None:
        self._groups = [
            [Sample(index=g * GROUP + i, group_index=g, prompt="2+2") for i in range(GROUP)]
            for g in range(GROUPS)
        ]

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        return self._groups[:num_samples]


def ledger_seconds(repeats: int = 50) -> float:
    """CPU seconds of the books for the groups of one step."""
    account = RolloutAccount(Prompts())
    start = time.process_time()
    for _ in range(repeats):
        for group in account.take(GROUPS):
            account.train(group)
        account.metrics()
        account.close()
    return (time.process_time() - start) / repeats


def run(model: Path, prompts: Path, directory: Path, steps: int, ranks: int, watched: bool) -> dict[str, Any]:
    """Wall seconds of each step and CPU seconds of the median one."""
    directory.mkdir()
    metrics, port = directory / "metrics.jsonl", find_available_port(24000)
    if not watched:
        cpu = run_steps(model, prompts, steps, metrics, ranks, reference=False)
        return {"wall_s": _walls(metrics), "cpu_s": cpu}
    viewer = Viewer(directory, port)
    with collector() as url, viewer.watching():
        flags = ["--dashboard", "--use-fault-tolerance", "--trace", directory / "trace.json"]
        flags += ["--prometheus-port", port, "--otlp-endpoint", url]
        flags += ["--save-debug-rollout-data", directory / "rollouts" / "{rollout_id}.pt"]
        cpu = run_steps(model, prompts, steps, metrics, ranks, reference=False, flags=flags)
    return {"wall_s": _walls(metrics), "cpu_s": cpu, "answers": viewer.answers}


def _walls(metrics: Path) -> list[float]:
    return [row["perf/step_time"] for row in read_steps(metrics)]


def figures(without: list[dict[str, Any]], watched: list[dict[str, Any]], ledger: float) -> dict[str, Any]:
    """Medians of both kinds of runs, and what one adds to the other."""
    wall = [statistics.median(s for one in runs for s in one["wall_s"]) for runs in (without, watched)]
    kinds = without[0]["cpu_s"]
    cpu = [
        {kind: statistics.median(one["cpu_s"][kind] for one in runs) for kind in kinds}
        for runs in (without, watched)
    ]
    whole = sum(cpu[0].values())
    share = {
        "wall": wall[1] / wall[0] - 1,
        "cpu": (sum(cpu[1].values()) + ledger) / whole - 1,
        "cpu_others": (cpu[1]["others"] - cpu[0]["others"] + ledger) / whole,
    }
    names = ("without", "with")
    return {
        "wall_s": dict(zip(names, wall, strict=True)),
        "cpu_s": dict(zip(names, cpu, strict=True)),
        "ledger_cpu_s": ledger,
        "share": share,
    }


def measure(size: str, rounds: int, steps: int, ranks: int) -> dict[str, Any]:
    runs: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write_prompts(directory / "prompts.jsonl")
        make_model(directory / "model", size)
        for number in range(2 * rounds):
            watched = number % 4 in (1, 2)  # a drift of the machine's speed meets both alike
            place = directory / f"run{number}"
            made = run(directory / "model", directory / "prompts.jsonl", place, steps, ranks, watched)
            runs[watched].append(made)
    found = figures(runs[False], runs[True], ledger_seconds())
    every = {"without": runs[False], "with": runs[True]}
    return {"size": size, **found, "runs": every, "load_average": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="10M")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=3, help="of each run, beside the one that warms up")
    parser.add_argument("--ranks", type=int, default=2, help="trainer processes, and engines")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    results = measure(options.size, options.rounds, options.steps, options.ranks)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
