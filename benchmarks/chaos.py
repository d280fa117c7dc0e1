"""Faults in real runs of several layouts, and what became of each: one ``slime chaos`` after the other.

    python benchmarks/chaos.py [--faults 10] [--seeds 0] [--layouts colocated fsdp]

A tiny model on CPU, eight answers a step, a checkpoint after each. Each run is done undisturbed before, but
for the asynchronous ones, whose twins differ: the clock says which weights make an answer. Writes what was
found of each layout and seed, and the faults of all of them by victim. Ends with status 1 if a run did not
heal.
"""

import argparse
import json
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from examples.calculator_tool.make_data import main as make_data  # noqa: E402
from slime.chaos.disturbance import Outcome  # noqa: E402
from slime.chaos.faults import Kind  # noqa: E402
from slime.chaos.report import victims  # noqa: E402
from slime.cli.chaos import run as run_chaos  # noqa: E402
from slime.utils.types import Sample  # noqa: E402
from tools.make_tiny_model import main as make_tiny_model  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "chaos.json"
_FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
_ENGINES = ("--rollout-num-gpus", "2", "--use-fault-tolerance")
LAYOUTS: dict[str, Sequence[str]] = {
    "colocated": ("--colocate", "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"),
    "two ranks, engines replaced": ("--actor-num-gpus-per-node", "2", *_ENGINES),
    "fsdp": ("--train-backend", "fsdp", "--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "1"),
    "ppo": (
        *("--advantage-estimator", "ppo", "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"),
        *("--critic-num-gpus-per-node", "1"),
    ),
    "async": ("--async", "--actor-num-gpus-per-node", "1", *_ENGINES),
    "fully async": (
        *("--async", "--rollout-function-path", _FULLY_ASYNC, "--actor-num-gpus-per-node", "1", *_ENGINES),
    ),
}


async def parity_reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """A random model gets it half of the time, so that every step has gradients."""
    return float(sum(sample.tokens) % 2)


def prepare(directory: Path) -> None:
    """Makes a tiny model and data for it."""
    make_tiny_model(["--output", str(directory / "model"), "--hidden-size", "64", "--num-layers", "2"])
    rows = ["--sft-rows", "8", "--rl-rows", "64", "--eval-rows", "8"]
    make_data(["--output", str(directory / "data"), *rows])


def flags(directory: Path, layout: Sequence[str], steps: int) -> list[str]:
    """A GRPO run of two prompts with four answers a step, and a checkpoint after each."""
    words: list[object] = [
        *("--hf-checkpoint", directory / "model", "--fp32", "--num-gpus-per-node", 8, "--seed", 7),
        *("--prompt-data", directory / "data" / "rl.jsonl", "--input-key", "prompt", "--label-key", "label"),
        *("--apply-chat-template", "--rollout-max-response-len", 12, "--num-rollout", steps),
        *("--custom-rm-path", "benchmarks.chaos.parity_reward"),
        *("--rollout-batch-size", 2, "--n-samples-per-prompt", 4, "--global-batch-size", 8),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", 512, "--lr", 1e-4),
        *("--save-interval", 1, "--keep-checkpoints", 2, "--max-restarts", 10, *layout),
    ]
    return list(map(str, words))


def measure(layout: str, seed: int, faults: int, steps: int, reports: Path | None) -> dict[str, Any]:
    """What `slime chaos` found."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        prepare(directory)
        place = (
            reports / f"{layout.replace(' ', '-').replace(',', '')}-{seed}"
            if reports
            else directory / "chaos"
        )
        twin = [] if "--async" in LAYOUTS[layout] else ["--twin"]
        asked = [str(place), "--faults", str(faults), "--seed", str(seed), "--stuck-after", "300", *twin]
        run_chaos([*asked, "--", *flags(directory, LAYOUTS[layout], steps)])
        found: dict[str, Any] = json.loads((place / "chaos.json").read_text())
    return {"layout": layout, **found, "differences": (found["differences"] or [])[:10]}


def by_victim(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The faults of all runs, a row for each victim and kind."""
    outcomes = [
        Outcome(**{**fault, "kind": Kind(fault["kind"])}) for found in runs for fault in found["outcomes"]
    ]
    return [vars(row) for row in victims(outcomes)]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=10, help="in each run")
    parser.add_argument("--steps", type=int, default=12, help="of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--reports", type=Path, help="keeps the runs and their reports here")
    parser.add_argument("--output", type=Path, default=RESULTS)
    asked = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    runs: list[dict[str, Any]] = []
    for seed in asked.seeds:
        for layout in asked.layouts:
            print(f"== {layout}, seed {seed}", flush=True)
            runs.append(measure(layout, seed, asked.faults, asked.steps, asked.reports))
            results = {"faults": sum(len(found["outcomes"]) for found in runs)}
            results |= {"by_victim": by_victim(runs), "runs": runs}
            asked.output.write_text(json.dumps(results, indent=1) + "\n")
    if any(found["problems"] for found in runs):
        sys.exit("error: a run did not heal as it should (see its problems)")


if __name__ == "__main__":
    main()
