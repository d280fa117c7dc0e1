"""The phases of the quickstart: which command runs, and how far it is."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from slime.observability.jsonl import read_metrics
from tools.quickstart.algorithms import ALGORITHMS, title
from tools.quickstart.layout import (
    GREEDY,
    NUM_RL_ROLLOUTS,
    NUM_SFT_ROLLOUTS,
    SAMPLED,
    SFT_STEPS_PER_ROLLOUT,
    Layout,
)


@dataclass(frozen=True)
class Progress:
    """How many units are done, and lines about them (one per unit or per evaluation, in order)."""

    done: int
    lines: Sequence[str]


@dataclass(frozen=True)
class Phase:
    """One child process.

    Attributes:
        name: for the log file and the summary.
        title: for the screen.
        command: run in the repository's root.
        total: units of `progress`.
        every: on a screen that cannot draw a bar, every how many lines one is printed.
    """

    name: str
    title: str
    command: Sequence[str]
    total: int
    progress: Callable[[], Progress]
    every: int = 1


def plan(layout: Layout, seed: int, algorithm: str = "grpo") -> list[Phase]:
    """All phases in order; their inputs are written by the phases before them."""
    model = ["-m", "tools.make_tiny_model", "--output", str(layout.initial_model), "--seed", str(seed)]
    data = ["-m", "examples.calculator_tool.make_data", "--output", str(layout.data), "--seed", str(seed)]
    rows = ["--sft-rows", "6000", "--rl-rows", "1000", "--eval-rows", "256"]
    return [
        Phase("model", "Making a random model", [sys.executable, *model], 0, _nothing),
        Phase("data", "Making the problems", [sys.executable, *data, *rows], 0, _nothing),
        Phase(
            "sft",
            "Imitation: SFT on solved problems",
            _script("sft.sh"),
            NUM_SFT_ROLLOUTS,
            lambda: sft_progress(layout.sft_metrics),
            every=5,
        ),
        rl_phase(layout, algorithm, ALGORITHMS[algorithm], NUM_RL_ROLLOUTS),
    ]


def rl_phase(layout: Layout, algorithm: str, flags: Sequence[str], rollouts: int) -> Phase:
    """Practice by an algorithm, whose ``flags`` come after those of grpo.sh."""
    heading = f"Practice: {title(algorithm)} with a calculator"
    command = [*_script("grpo.sh"), *flags]
    return Phase(algorithm, heading, command, rollouts, lambda: rl_progress(layout.rl_metrics))


def environment(layout: Layout, seed: int, phase: Phase, backend: str = "megatron") -> dict[str, str]:
    """What the scripts of the phases expect, ``python`` being the interpreter that runs the quickstart."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    run = {"OUTPUT": str(layout.root), "SEED": str(seed), "NUM_ROLLOUT": str(phase.total)}
    return {**run, "TRAIN_BACKEND": backend, "PATH": path}


def write_eval_config(layout: Layout) -> None:
    """Two looks at the same held-out problems; the names mark their answers in the recordings."""
    datasets = [
        {
            "name": name,
            "path": str(layout.data / "eval.jsonl"),
            "temperature": temperature,
            "n_samples_per_eval_prompt": 1,
            "metadata_overrides": {"dataset": name},
        }
        for name, temperature in ((SAMPLED, 1.0), (GREEDY, 0.0))
    ]
    text = yaml.safe_dump({"eval": {"datasets": datasets}}, sort_keys=False)
    (layout.root / "eval.yaml").write_text(text)


def sft_progress(metrics_file: Path, steps_per_rollout: int = SFT_STEPS_PER_ROLLOUT) -> Progress:
    """One unit per rollout; the line shows the loss of its last optimizer step."""
    if not metrics_file.exists():
        return Progress(0, [])
    metrics = read_metrics(metrics_file)
    finished = [step for step, row in metrics["rollout"].items() if "perf/step_time" in row]
    ends = [(step + 1) * steps_per_rollout for step in finished]
    lines = [f"step {end:>3}   loss {metrics['train'][end - 1]['train/loss']:.3f}" for end in ends]
    return Progress(len(finished), lines)


def rl_progress(metrics_file: Path) -> Progress:
    """One unit per rollout; its line shows the reward, and evaluations have lines of their own."""
    if not metrics_file.exists():
        return Progress(0, [])
    metrics = read_metrics(metrics_file)
    finished = {step: row for step, row in metrics["rollout"].items() if "perf/step_time" in row}
    lines = []
    for step in range(max([*finished, *metrics["eval"], -1]) + 2):
        # An evaluation "at step" looks at the model after that many rollouts.
        if row := metrics["eval"].get(step):
            scores = f"{row[f'eval/{SAMPLED}']:.0%} sampled, {row[f'eval/{GREEDY}']:.0%} greedy"
            lines.append(f"held-out accuracy after {step} rollouts: {scores}")
        if row := finished.get(step):
            lines.append(reward_line(step + 1, row["rollout/raw_reward"], row["rollout/response_len/mean"]))
    return Progress(len(finished), lines)


def reward_line(number: int, reward: float, length: float, width: int = 24) -> str:
    filled = round(reward * width)
    bar = "█" * filled + "░" * (width - filled)
    return f"rollout {number:>2}   {bar}   reward {reward:.2f}   {length:4.1f} tokens"


def write_summary(layout: Layout, summary: dict[str, object]) -> None:
    layout.summary.write_text(json.dumps(summary, indent=2) + "\n")


def _script(name: str) -> list[str]:
    return ["bash", f"scripts/quickstart/{name}"]


def _nothing() -> Progress:
    return Progress(0, [])
