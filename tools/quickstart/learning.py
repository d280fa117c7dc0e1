"""How far each algorithm gets on the quickstart's task from one and the same start.

    python -m tools.quickstart.learning [--only rloo gspo] [--rollouts 20] [--output DIR] [--results FILE]

The model, the data and the SFT phase are made once; a second run in the same directory takes them as they
are. Then each algorithm practises in a directory of its own. Writes the curves as JSON: held-out accuracy and
reward by rollout, and wall seconds. ``distillation`` comes last: the model that GRPO (or the first algorithm
of ``--only``) has made teaches the one that it was made from, with no reward of its own.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from slime.observability.jsonl import read_metrics
from tools.quickstart.algorithms import ALGORITHMS
from tools.quickstart.layout import GREEDY, NUM_RL_ROLLOUTS, SAMPLED, Layout
from tools.quickstart.phases import Phase, environment, plan, rl_phase, write_eval_config
from tools.quickstart.runner import run_phase

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results" / "learning.json"
DISTILLATION = "distillation"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/learning.sh", description=__doc__, allow_abbrev=False)
    names = [*ALGORITHMS, DISTILLATION]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="algorithms, in this order")
    parser.add_argument("--rollouts", type=int, default=NUM_RL_ROLLOUTS, help="of each algorithm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "outputs/learning")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    args.output, args.results = args.output.resolve(), args.results.resolve()
    os.chdir(REPOSITORY)  # where the phases find their scripts
    start = Layout(args.output / "start")
    console = Console()
    prepare_start(start, args.seed, console)
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    losses = read_metrics(start.sft_metrics)["train"]
    results["sft"] = {
        "loss": _series({step: losses[step] for step in losses if step % 10 == 9}, "train/loss")
    }
    for name in args.only:
        layout = branch(start, args.output / name)
        flags = distillation_flags(args.output, args.only) if name == DISTILLATION else ALGORITHMS[name]
        seconds = practise(layout, args.seed, args.rollouts, name, flags, console)
        results[name] = curves(layout) | {
            "flags": list(flags),
            "wall_s": round(seconds, 1),
            "seed": args.seed,
        }
        args.results.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
        console.print(f"{name}: {results[name]['eval_sampled']}")
    return 0


def prepare_start(layout: Layout, seed: int, console: Console) -> None:
    """The phases before practice, unless an earlier run has been through them."""
    done = layout.root / "done"
    if done.exists():
        return
    shutil.rmtree(layout.root, ignore_errors=True)
    layout.root.mkdir(parents=True)
    write_eval_config(layout)
    for phase in plan(layout, seed)[:-1]:
        _run(layout, seed, phase, console)
    done.touch()


def branch(start: Layout, root: Path) -> Layout:
    """A new directory with links to what all algorithms begin with."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    layout = Layout(root)
    for link, target in ((layout.sft_model, start.sft_model), (layout.data, start.data)):
        link.symlink_to(target)
    write_eval_config(layout)
    return layout


def practise(
    layout: Layout, seed: int, rollouts: int, name: str, flags: Sequence[str], console: Console
) -> float:
    """Wall seconds of a run of grpo.sh with these flags on top."""
    return _run(layout, seed, rl_phase(layout, name, flags, rollouts), console)


def _run(layout: Layout, seed: int, phase: Phase, console: Console) -> float:
    env = environment(layout, seed, phase)
    return run_phase(phase, layout.logs / f"{phase.name}.log", env, console)


def distillation_flags(output: Path, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the flags of a run whose teacher is the model of the first algorithm."""
    teachers = [Layout(output / name).rl_model for name in ("grpo", *names) if name != DISTILLATION]
    teacher = next((path for path in teachers if path.exists()), None)
    if teacher is None:
        raise ValueError(f"distillation: no algorithm has left a model in {output} to be the teacher")
    return (
        *("--use-opd", "--opd-type", "megatron", "--opd-teacher-load", str(teacher)),
        *("--custom-reward-post-process-path", "tools.quickstart.learning.without_rewards"),
    )


def without_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Rewards are reported, and nothing is learnt from them."""
    return [sample.get_reward_value(args) for sample in samples], [0.0] * len(samples)


def curves(layout: Layout) -> dict[str, Any]:
    """Held-out accuracy by rollouts trained, and per rollout the reward and, with a teacher, the KL to it."""
    metrics = read_metrics(layout.rl_metrics)
    evals = {f"eval_{kind}": _series(metrics["eval"], f"eval/{kind}") for kind in (SAMPLED, GREEDY)}
    rewards = _series(metrics["rollout"], "rollout/raw_reward")
    kl = _series(metrics["rollout"], "rollout/opd_reverse_kl")
    seconds = [row["perf/step_time"] for row in metrics["rollout"].values() if "perf/step_time" in row]
    found = {**evals, "reward": rewards, "step_s": round(sum(seconds) / len(seconds), 2)}
    return found | ({"opd_reverse_kl": kl} if kl else {})


def _series(rows: Any, name: str) -> dict[str, float]:
    return {str(step): round(row[name], 5) for step, row in sorted(rows.items()) if name in row}


if __name__ == "__main__":
    started = time.monotonic()
    status = main()
    print(f"{time.monotonic() - started:.0f} s")
    sys.exit(status)
