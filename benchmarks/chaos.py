"""Faults in real runs of every layout, and what became of each: one ``slime chaos`` after the other.

    python benchmarks/chaos.py [--faults 10] [--seeds 0] [--layouts colocated fsdp]

A tiny model on CPU, eight answers a step, a checkpoint after each. Each run must end well, leave nothing,
have a row for every rollout and every step, no sample of weights that were not there yet, and books on which
each group of samples is trained on once. A synchronous one is done undisturbed before, and must have the
numbers of that twin, unless it is one of those that promise none: with `--async` the clock says which weights
make an answer, a logged answer that another manager ends has its log-probs in two parts, and an evaluation
beside training that loses its engines is missing.

Writes what was found of each layout and seed, with the commit and the load of the machine, and the faults of
all of them by victim, and the share of its time that a run would train if it lost every tenth of 256 engines
and ranks in an hour. Results add up: a run replaces the one of its layout and seed, ``--anew`` all. Ends
with status 1 if a run did not heal.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.come_and_go import coming_and_going  # noqa: E402
from examples.calculator_tool.make_data import main as make_data  # noqa: E402
from examples.two_policies.game import EDITOR, WRITER  # noqa: E402
from examples.two_policies.make_data import main as make_tasks  # noqa: E402
from slime.chaos.disturbance import Outcome  # noqa: E402
from slime.chaos.faults import Kind  # noqa: E402
from slime.chaos.report import victims  # noqa: E402
from slime.cli.chaos import run as run_chaos  # noqa: E402
from slime.observability.jsonl import read_metrics  # noqa: E402
from slime.utils.types import Sample  # noqa: E402
from tools.make_tiny_model import main as make_tiny_model  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "chaos.json"
_FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
_TOLERANT, _ASYNC = "--use-fault-tolerance", "--async"
PROMPTS, ANSWERS = 2, 4
STUCK_AFTER_S, HANGS_MINUTES = 300, 2
"""Whoever lives and does nothing is known for it before the run counts as stuck."""
_SEEDS_APART = 1000
LOSSES_PER_HOUR = 25.6
"""A tenth of 256 engines and ranks."""
LOST_ROLES = ("engine", "engine actor", "trainer rank")
LOSSES = (Kind.KILL, Kind.STOP, Kind.TERM)


def _gpus(ranks: int, engines: int) -> tuple[str, ...]:
    return "--actor-num-gpus-per-node", str(ranks), "--rollout-num-gpus", str(engines)


LAYOUTS: Mapping[str, Sequence[str]] = {
    "one rank": (*_gpus(1, 2), _TOLERANT),
    "two ranks, engines replaced": (*_gpus(2, 2), _TOLERANT),
    "colocated": ("--colocate", *_gpus(2, 2), _TOLERANT),
    "not tolerant": ("--colocate", *_gpus(1, 1)),
    "fsdp": ("--train-backend", "fsdp", *_gpus(2, 2), _TOLERANT),
    "ppo": ("--advantage-estimator", "ppo", "--critic-num-gpus-per-node", "1", *_gpus(1, 2), _TOLERANT),
    "async": (_ASYNC, *_gpus(1, 2), _TOLERANT),
    "async, two ranks": (_ASYNC, *_gpus(2, 2), _TOLERANT),
    "fully async": (_ASYNC, "--rollout-function-path", _FULLY_ASYNC, *_gpus(1, 2), _TOLERANT),
    "disk": (
        *("--update-weight-transport", "disk", "--update-weight-disk-dir", "{directory}/weights"),
        *(*_gpus(2, 2), _TOLERANT),
    ),
    "adapters": ("--lora-rank", "4", *_gpus(1, 2), _TOLERANT),
    "token log": (
        *("--token-log-dir", "{directory}/tokens", "--token-log-interval", "4"),
        *(*_gpus(1, 2), _TOLERANT),
    ),
    "evaluations beside training": (
        *("--sglang-config", "{directory}/fleet.json", "--eval-model", "judged"),
        *("--eval-prompt-data", "sums", "{directory}/data/eval.jsonl", "--eval-interval", "2"),
        *(*_gpus(1, 3), _TOLERANT),
    ),
    "elastic": ("--rollout-spare-gpus", "2", *_gpus(1, 2), _TOLERANT),
    "engines by their requests": (
        *("--rollout-spare-gpus", "2", "--rollout-queue-per-engine", "2", "--rollout-scaling-interval", "5"),
        *("--rollout-max-response-len", "96", *_gpus(1, 2), _TOLERANT),
    ),
    "standbys": ("--trainer-standbys", "1", *_gpus(2, 2), _TOLERANT),
    "policies": (
        *("--policies", "{directory}/policies.json", "--prompt-data", "{directory}/data/tasks.jsonl"),
        *("--custom-generate-function-path", "examples.two_policies.game.play", *_gpus(1, 1), _TOLERANT),
    ),
}
"""The flags of each; ``{directory}`` is that of the model and the data."""
ELASTIC = "elastic"
"""Somebody has its engines join and leave all the time, except in the twin."""
WITHOUT_TWIN = ("async", "async, two ranks", "fully async", "token log", "evaluations beside training")


async def parity_reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """A random model gets it half of the time, so that every step has gradients."""
    return float(sum(sample.tokens) % 2)


def prepare(directory: Path) -> None:
    """Makes a tiny model, data for it, the fleet that is evaluated beside training, and two policies."""
    make_tiny_model(["--output", str(directory / "model"), "--hidden-size", "64", "--num-layers", "2"])
    rows = ["--sft-rows", "8", "--rl-rows", "64", "--eval-rows", "8"]
    make_data(["--output", str(directory / "data"), *rows])
    models = [
        {"name": name, "server_groups": [{"worker_type": "regular", "num_gpus": engines}]}
        for name, engines in (("policy", 2), ("judged", 1))
    ]
    (directory / "fleet.json").write_text(json.dumps({"sglang": models}))
    make_tasks(["--output", str(directory / "data" / "tasks.jsonl")])
    policies = [{"name": WRITER, "rollout_num_gpus": 2}, {"name": EDITOR}]
    (directory / "policies.json").write_text(json.dumps({"policies": policies}))


def flags(directory: Path, layout: Sequence[str], steps: int) -> list[str]:
    """A GRPO run of two prompts with four answers a step, and a checkpoint after each."""
    words: list[object] = [
        *("--hf-checkpoint", directory / "model", "--fp32", "--num-gpus-per-node", 8, "--seed", 7),
        *("--prompt-data", directory / "data" / "rl.jsonl", "--input-key", "prompt", "--label-key", "label"),
        *("--apply-chat-template", "--rollout-max-response-len", 12, "--num-rollout", steps),
        *("--custom-rm-path", "benchmarks.chaos.parity_reward"),
        *(
            "--rollout-batch-size",
            PROMPTS,
            "--n-samples-per-prompt",
            ANSWERS,
            "--global-batch-size",
            PROMPTS * ANSWERS,
        ),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", 512, "--lr", 1e-4),
        *("--save-interval", 1, "--keep-checkpoints", 2, "--max-restarts", 10),
        *("--distributed-timeout-minutes", HANGS_MINUTES),
        *(word.format(directory=directory) for word in layout),
    ]
    return list(map(str, words))


def measure(layout: str, seed: int, plan: Sequence[str], steps: int, reports: Path | None) -> dict[str, Any]:
    """What `slime chaos` found, and what the run has broken of its promises beside that.

    Args:
        plan: words about the faults.
        reports: where the run is kept.
    """
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        prepare(directory)
        name = f"{layout.replace(' ', '-').replace(',', '')}-{seed}"
        place = reports / name if reports else directory / "chaos"
        twin = [] if layout in WITHOUT_TWIN else ["--twin"]
        drawn = seed + _SEEDS_APART * list(LAYOUTS).index(layout)  # or each layout would meet the same faults
        asked = [str(place), "--seed", str(drawn), "--stuck-after", str(STUCK_AFTER_S), *plan, *twin]
        load = os.getloadavg()[0]
        with coming_and_going(place / "disturbed", drawn) if layout == ELASTIC else nullcontext() as done:
            run_chaos([*asked, "--", *flags(directory, LAYOUTS[layout], steps)])
        found: dict[str, Any] = json.loads((place / "chaos.json").read_text())
        found["problems"] += broken_promises(place / "disturbed", steps)
    found["differences"] = (found["differences"] or [])[:10]
    found |= {} if done is None else {"engines": done}
    return {"layout": layout, "commit": _commit(), "load_before": round(load, 1), **found}


def broken_promises(run: Path, steps: int) -> Iterator[str]:
    """Yields what does not hold of a run that has ended, whatever the clock said.

    Args:
        run: its directory.
        steps: rollouts that it was to make, and steps.
    """
    axes = read_metrics(run / "metrics.jsonl")
    for axis in ("rollout", "train"):
        if missing := set(range(steps)) - axes[axis].keys():
            yield f"no row of {axis} {', '.join(map(str, sorted(missing)[:10]))}"
        if more := [step for step in axes[axis] if step >= steps]:
            yield f"rows of {axis} that were not to be: {more[:10]}"
    for step, row in axes["rollout"].items():
        if any(value < 0 for name, value in row.items() if "staleness" in name):
            yield f"rollout {step} has samples of weights that were not there yet"
    try:
        yield from _errors_in_books(run, steps)
    except (OSError, RuntimeError) as error:
        yield f"the state of the data cannot be read: {error}"


def _errors_in_books(run: Path, steps: int) -> Iterator[str]:
    state = torch.load(run / "rollout" / f"global_dataset_state_dict_{steps - 1}.pt", weights_only=True)
    books = state["ledger"]
    if books["trained"] != steps * PROMPTS:
        yield f"{books['trained']} groups were trained on (wanted: {steps * PROMPTS})"
    places = [books[fate] for fate in ("trained", "filtered", "buffered", "leased")]
    if books["issued"] != sum(places) + sum(books["dropped"].values()):
        yield f"groups are lost or came from nowhere: {books}"
    numbers = [sample["group_index"] for group in state.get("leased", []) for sample in group]
    if twice := [number for number in set(numbers) if numbers.count(number) > ANSWERS]:
        yield f"groups are out twice: {twice[:10]}"


def _commit() -> str:
    """The commit that runs; with a plus if files of the product differ from it."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True).stdout
    changed = subprocess.run([*git, "status", "--porcelain", "slime"], capture_output=True).stdout
    return commit.strip() + "+" * bool(changed)


def by_victim(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The faults of all runs, a row for each victim and kind."""
    outcomes = [
        Outcome(**{**fault, "kind": Kind(fault["kind"])}) for found in runs for fault in found["outcomes"]
    ]
    return [vars(row) for row in victims(outcomes)]


def kept(output: Path, anew: bool) -> list[dict[str, Any]]:
    """The runs of which results are there already."""
    if anew or not output.exists():
        return []
    runs: list[dict[str, Any]] = json.loads(output.read_text())["runs"]
    return runs


def with_run(runs: Sequence[dict[str, Any]], found: dict[str, Any]) -> list[dict[str, Any]]:
    """All runs, of which ``found`` replaces the one of its layout and seed."""
    key = lambda run: (run["layout"], run["plan"]["seed"])
    return sorted([*(run for run in runs if key(run) != key(found)), found], key=key)


def write(output: Path, runs: Sequence[dict[str, Any]]) -> None:
    """Writes the results."""
    kinds = Counter(fault["kind"] for found in runs for fault in found["outcomes"])
    results = {"faults": kinds, "by_victim": by_victim(runs), **training_time_ratio(runs), "runs": runs}
    output.write_text(json.dumps(results, indent=1) + "\n")


def training_time_ratio(
    runs: Sequence[dict[str, Any]], losses_per_hour: float = LOSSES_PER_HOUR
) -> dict[str, float]:
    """The share of its time that a run trains, as if each loss stood still for all the time to the next step.

    Args:
        runs: of which the faults give what a loss costs: the seconds from a lost engine or rank to the next
            step, of kills and stops, whatever struck meanwhile. It is what a step itself takes too,
            and of a tiny model: a large one takes longer to load.
    """
    costs = [
        fault["recovered_s"]
        for found in runs
        for fault in found["outcomes"]
        if fault["role"] in LOST_ROLES and fault["kind"] in LOSSES and fault["recovered_s"] is not None
    ]
    cost = sum(costs) / max(1, len(costs))
    return {
        "losses_per_hour": losses_per_hour,
        "losses_seen": len(costs),
        "seconds_per_loss": round(cost, 1),
        "training_time_ratio": round(1 / (1 + losses_per_hour * cost / 3600), 3),
    }


def table(results: dict[str, Any]) -> str:
    """The faults by victim and kind, as docs/fleets.md has them."""
    lines = ["| victim | fault | struck | went on | started again | not healed | slowest next step |"]
    lines.append("|" + "---|" * 7)
    for row in results["by_victim"]:
        counts = [row[name] for name in ("struck", "went_on", "started_again")]
        slowest = "never" if row["slowest_s"] is None else f"{row['slowest_s']:.0f} s"
        cells = [row["role"], row["kind"], *counts, counts[0] - counts[1] - counts[2], slowest]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=10, help="in each run")
    parser.add_argument(
        "--kinds", default="", help="as slime chaos takes them; one that is named twice is twice as likely"
    )
    parser.add_argument("--victims", default="", help="as slime chaos takes them")
    parser.add_argument("--steps", type=int, default=12, help="of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--reports", type=Path, help="keeps the runs and their reports here")
    parser.add_argument("--anew", action="store_true", help="forgets the results that are there")
    parser.add_argument("--output", type=Path, default=RESULTS)
    asked = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    plan = ["--faults", str(asked.faults), "--victims", asked.victims]
    plan += ["--kinds", asked.kinds] if asked.kinds else []
    runs, failed = kept(asked.output, asked.anew), False
    for seed in asked.seeds:
        for layout in asked.layouts:
            print(f"== {layout}, seed {seed}", flush=True)
            found = measure(layout, seed, plan, asked.steps, asked.reports)
            print(*found["problems"], sep="\n", flush=True)
            failed |= bool(found["problems"])
            runs = with_run(runs, found)
            write(asked.output, runs)
    if failed:
        sys.exit("error: a run did not heal as it should (see its problems)")


if __name__ == "__main__":
    main()
