"""The quickstart's report: one HTML file that needs nothing beside itself."""

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from tools.quickstart.algorithms import title
from tools.quickstart.charts import Series, line_chart, percent, stacked_bar
from tools.quickstart.layout import GREEDY, SAMPLED, Layout
from tools.quickstart.summary import Metrics, Steps
from tools.quickstart.transcripts import Transcript, load_tokenizer, pick_pairs, read_recording, tool_share

HERE = Path(__file__).parent
ROUNDING_LIMIT = 1e-5

COMPARED = "Whatever the better attempts of a group did"
LESSONS = {
    "ppo": "Whatever did better than a second model, the critic, expected",
    "reinforce_plus_plus": "Whatever did better than the mean of the whole round",
}

NEXT_STEPS = """\
bash scripts/quickstart.sh --seed 1       another model, other data
{log:<41} what every process said
cat scripts/quickstart/grpo.sh            the flags of this run: change --lr, --n-samples-per-prompt, ...
less examples/calculator_tool/README.md   write your own tool and reward
less docs/usage.md                        from here to a real model on GPUs"""


def write_report(layout: Layout, metrics: Metrics, summary: Mapping[str, Any]) -> None:
    """Write ``report.html``. ``metrics`` are those of the RL phase, ``summary`` is that of summary.json."""
    before, after = _evaluations(layout, metrics)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    page = environment.get_template("report.html.j2").render(
        css=(HERE / "report.css").read_text(),
        s=summary,
        pct=percent,
        minutes=lambda seconds: f"{int(seconds) // 60} min {int(seconds) % 60:02d} s",
        num_problems=f"{32 * summary['num_rollouts']:,}",
        example_question=before[0].question if before else "47*28",
        pairs=pick_pairs(before, after),
        selection_note=_selection_note(before, after),
        next_steps=NEXT_STEPS.format(log=f"less {layout.root}/logs/{summary['algorithm']}.log"),
        lesson=LESSONS.get(summary["algorithm"], COMPARED),
        compares=summary["algorithm"] not in LESSONS,
        algorithm=title(summary["algorithm"]),
        footer=f"Made by slime's quickstart on {platform.machine()}, Python {platform.python_version()}. "
        f"Raw numbers: {layout.rl_metrics.name} and {layout.summary.name} beside this file.",
        **_charts(layout, metrics),
        **_time_bars(summary),
    )
    layout.report.write_text(page, encoding="utf-8")


def _charts(layout: Layout, metrics: Metrics) -> dict[str, str]:
    rollouts, evals = metrics["rollout"], metrics["eval"]
    gap = _points(metrics["train"], "train/train_rollout_logprob_abs_diff", offset=1)
    shares = _tool_shares(layout, rollouts)
    return {
        "reward_chart": line_chart(
            [Series("reward", _points(rollouts, "rollout/raw_reward", offset=1))],
            x_label="round of practice",
            y_range=(0, 1),
            title="Mean reward per rollout",
        ),
        "accuracy_chart": line_chart(
            [
                Series("sampled", _points(evals, f"eval/{SAMPLED}"), colour=1),
                Series("greedy", _points(evals, f"eval/{GREEDY}"), colour=2),
            ],
            x_label="rounds of practice so far",
            y_range=(0, 1),
            y_format=percent,
            title="Held-out accuracy, sampled and greedy",
        ),
        "tool_chart": line_chart(
            [Series("calls the tool", shares, colour=3)],
            x_label="round of practice",
            y_range=(0, 1),
            y_format=percent,
            title="Share of answers that call the calculator",
        )
        if shares
        else "",
        "length_chart": line_chart(
            [Series("tokens", _points(rollouts, "rollout/response_len/mean", offset=1), colour=4)],
            x_label="round of practice",
            title="Mean response length in tokens",
        ),
        "gap_chart": line_chart(
            [Series("gap", gap)],
            x_label="round of practice",
            log=True,
            limit=(ROUNDING_LIMIT, "rounding error"),
            title="Mean absolute log-probability gap between trainer and engine",
        ),
    }


def _time_bars(summary: Mapping[str, Any]) -> dict[str, Any]:
    phases, steps = list(summary["phase_s"].items()), list(summary["rl_step_s"].items())
    return {
        "phase_bar": stacked_bar(phases, title="Seconds per phase"),
        "phase_names": _timed_names(phases),
        "step_bar": stacked_bar(steps, title="Seconds per part of an RL step"),
        "step_names": _timed_names(steps),
    }


def _timed_names(parts: Sequence[tuple[str, float]]) -> list[str]:
    return [f"{name} {seconds:.1f} s" for name, seconds in parts]


def _points(steps: Steps, name: str, offset: int = 0) -> list[tuple[float, float]]:
    """A metric by step; ``offset`` 1 counts rounds from one."""
    return [(step + offset, float(row[name])) for step, row in steps.items() if name in row]


def _evaluations(layout: Layout, metrics: Metrics) -> tuple[list[Transcript], list[Transcript]]:
    """The sampled answers of the first and the last evaluation; empty lists without recordings."""
    paths = [layout.recordings / f"eval_{step}.pt" for step in (min(metrics["eval"]), max(metrics["eval"]))]
    if not all(path.exists() for path in paths):
        return [], []
    tokenizer = load_tokenizer(layout.sft_model)
    before, after = ([t for t in read_recording(path, tokenizer) if t.dataset == SAMPLED] for path in paths)
    return before, after


def _tool_shares(layout: Layout, rollouts: Steps) -> list[tuple[float, float]]:
    recordings = {step: layout.recordings / f"{step}.pt" for step in rollouts}
    present = {step: path for step, path in recordings.items() if path.exists()}
    if not present:
        return []
    tokenizer = load_tokenizer(layout.sft_model)
    return [(step + 1, tool_share(read_recording(path, tokenizer))) for step, path in present.items()]


def _selection_note(before: Sequence[Transcript], after: Sequence[Transcript]) -> str:
    def text(answers: Sequence[Transcript]) -> str:
        return f"{percent(tool_share(answers))} called the calculator" if answers else "none were recorded"

    return (
        "Sampled answers to held-out problems, picked by position: the first that turned from wrong to "
        "right, the first that was right all along, the first that is still wrong (if any), then more that "
        "turned. "
        f"Of all answers before practice, {text(before)}; after it, {text(after)}."
    )
