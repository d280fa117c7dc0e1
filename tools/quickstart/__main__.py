"""Run the quickstart: ``python -m tools.quickstart [--seed N] [--output DIR]``.

scripts/quickstart.sh makes the environment and then runs this.
"""

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console

from slime.observability.jsonl import read_metrics
from slime.processes.exclusive import DirectoryUnusable, exclusive
from tools.quickstart.algorithms import ALGORITHMS
from tools.quickstart.layout import Layout
from tools.quickstart.phases import environment, plan, write_eval_config, write_summary
from tools.quickstart.runner import PhaseFailed, run_phase

MARKER = ".slime-quickstart"
REPOSITORY = Path(__file__).resolve().parents[2]
CALLED_FROM = Path.cwd()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/quickstart.sh",
        description="Train a tiny language model to use a calculator, on two CPU cores.",
        allow_abbrev=False,
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the data and the sampling")
    parser.add_argument(
        "--output", type=Path, default=REPOSITORY / "outputs/quickstart", help="directory of results"
    )
    parser.add_argument(
        "--train-backend", choices=("megatron", "fsdp"), default="megatron", help="the trainer of both phases"
    )
    parser.add_argument(
        "--advantage-estimator", choices=ALGORITHMS, default="grpo", help="by which the model practises"
    )
    args = parser.parse_args(argv)
    if args.seed < 0:
        parser.error(f"--seed {args.seed}: wanted 0 or more")
    signal.signal(signal.SIGTERM, _exit_on_signal)
    layout = Layout(args.output.resolve())
    os.chdir(REPOSITORY)  # where the phases find their scripts
    lock = layout.root.with_name(f".{layout.root.name}.in_use")
    try:
        with exclusive(lock, f"--output {args.output}"):
            prepare_output(layout.root)
            run(layout, args.seed, Console(), args.train_backend, args.advantage_estimator)
    except (PhaseFailed, DirectoryUnusable, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def prepare_output(root: Path) -> None:
    """An empty directory; results of an earlier quickstart are removed, anything else is not touched.

    Raises:
        ValueError: the directory holds other files.
    """
    if root.exists() and any(root.iterdir()):
        if not (root / MARKER).exists():
            raise ValueError(
                f"--output {root}: holds files that are not a quickstart's; wanted a new directory"
            )
        shutil.rmtree(root)
    root.mkdir(parents=True, exist_ok=True)
    (root / MARKER).touch()


def run(
    layout: Layout, seed: int, console: Console, backend: str = "megatron", algorithm: str = "grpo"
) -> None:
    """All phases, then the report and the summary."""
    start = time.monotonic()
    seconds: dict[str, float] = {}
    write_eval_config(layout)
    for phase in plan(layout, seed, algorithm):
        env = environment(layout, seed, phase, backend)
        seconds[phase.name] = run_phase(phase, layout.logs / f"{phase.name}.log", env, console)

    # These need torch; importing them earlier would delay the first line on the screen.
    from tools.quickstart.report import write_report
    from tools.quickstart.summary import summarise

    report_start = time.monotonic()
    metrics = read_metrics(layout.rl_metrics)
    summary = summarise(metrics, seconds, seed=seed, wall_s=report_start - start, algorithm=algorithm)
    write_report(layout, metrics, summary)
    now = time.monotonic()
    summary["wall_s"] = now - start
    summary["phase_s"]["report"] = now - report_start
    write_summary(layout, summary)
    print_figures(layout, summary, console)


def print_figures(layout: Layout, summary: dict[str, Any], console: Console) -> None:
    def change(kind: str) -> str:
        return f"{summary[f'eval_{kind}_sft']:.0%} → {summary[f'eval_{kind}_rl']:.0%}"

    report = _shortest(layout.report)
    console.print(
        f"""
[bold]Held-out accuracy, after imitation → after practice[/bold]
  sampled   {change("sampled")}
  greedy    {change("greedy")}
Log-prob gap between engine and trainer at the first RL step: {summary["first_logprob_abs_diff"]:.1e}
Time: {summary["wall_s"]:.0f} s

[bold]Next[/bold]
  open {report}
  bash scripts/quickstart.sh --seed 1
  {_shortest(Path(sys.executable))} train.py --help
  read docs/quickstart.md and examples/calculator_tool/README.md, then change the task
The trained model is in {_shortest(layout.rl_model)}; AutoModelForCausalLM loads it.""",
        highlight=False,
        soft_wrap=True,
    )


def _shortest(path: Path) -> Path:
    return path.relative_to(CALLED_FROM) if path.is_relative_to(CALLED_FROM) else path


def _exit_on_signal(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    raise SystemExit(main())
