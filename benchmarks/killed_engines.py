"""Agents' turns in a run whose engines are killed again and again, while its weights change all the time.

    python benchmarks/killed_engines.py [--steps 150]

A program of another process has conversations by OpenAI's client: it knows an address and a key, and asks
no turn twice. Each conversation is an answer of a run of ``train_async.py`` on CPUs, with two engines behind
slime's router. In every second or third step an engine is killed, while it tells a turn or in the middle of a
weight update. Afterwards each token that was trained on is found in what passed the router, with its log-prob
and its version, and the books of the run are read. It fails if a turn was lost, or if a run of 100 steps
and more has not learned.

Writes how many turns, updates and kills there were, and what the turns cost: streams that went on at another
engine, requests that were asked again from their beginning, tokens that were computed again.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from examples.calculator_tool.make_data import main as make_data  # noqa: E402
from tests.e2e.agents_proof import Evidence, prove  # noqa: E402
from tests.e2e.outside_agents import DIRECTORY, decided_model, flags  # noqa: E402
from tools.make_tiny_model import main as make_tiny_model  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "killed_engines.json"
ENOUGH_STEPS = 100
"""Fewer of them may end before the reward has risen: how much a run learns early is luck."""
_COLUMNS = {
    "turns": "turns",
    "lost": "turns_lost",
    "updates": "updates",
    "engines killed": "kills",
    "killed in a turn": "kills_in_turns",
    "killed in an update": "kills_in_updates",
    "turns of several versions": "turns_of_several_versions",
    "streams that went on elsewhere": "streams_continued_elsewhere",
    "tokens": "tokens",
    "computed again": "recomputed_tokens",
    "not told of": "recomputed_beyond_metric",
}


def measure(directory: Path, steps: int) -> dict[str, Any]:
    make_tiny_model(["--output", str(directory / "random"), "--hidden-size", "64", "--num-layers", "2"])
    model = decided_model(directory / "random", directory / "model")
    make_data(["--output", str(directory / "data"), "--rl-rows", "64", "--sft-rows", "1", "--eval-rows", "1"])
    words = map(str, flags(model, directory / "data" / "rl.jsonl", steps, directory))
    env, begun = os.environ | {DIRECTORY: str(directory)}, time.monotonic()
    with (directory / "log").open("w") as log:
        run = subprocess.run(
            [sys.executable, "train_async.py", *words], cwd=ROOT, env=env, stdout=log, stderr=log
        )
    if run.returncode:
        raise RuntimeError(f"the run ended with {run.returncode}:\n{(directory / 'log').read_text()[-4000:]}")
    return {"steps": steps, "seconds": time.monotonic() - begun, **prove(Evidence.of(directory, steps))}


def not_learned(found: Mapping[str, Any]) -> str | None:
    """What is wrong with the reward of a run that was long enough to learn."""
    first, last = (found["reward"][f"{name}_quarter"] for name in ("first", "last"))
    if found["steps"] < ENOUGH_STEPS or last >= min(first + 0.1, 0.95):
        return None
    return f"the reward went from {first:.2f} to {last:.2f} (wanted: 0.1 more, or 0.95)"


def table(found: Mapping[str, Any]) -> str:
    """Returns what was counted, as the page on agents has it."""
    row = [f"{found[name]:,}" for name in _COLUMNS.values()]
    head, numbers = (f"| {' | '.join(line)} |" for line in (_COLUMNS, row))
    return "\n".join([head, "|---" * len(row) + "|", numbers])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        found = {**measure(Path(scratch), options.steps), "load": os.getloadavg()[2]}
    options.output.write_text(json.dumps(found, indent=2) + "\n")
    print(table(found))
    if wrong := not_learned(found):
        sys.exit(f"error: {wrong}")


if __name__ == "__main__":
    main()
