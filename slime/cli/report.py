"""``slime report``: what a run has come to, from its metrics."""

import argparse
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from slime.arguments.core.errors import UsageError
from slime.cli.run_dir import Record, max_staleness, metrics_file, read_record
from slime.observability.alerts import alerts_of
from slime.observability.console import duration
from slime.observability.jsonl import read_metrics, read_rows
from slime.observability.policy_rows import PolicyRows

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 40
_ROUNDING = 1e-6
"""Up to this a loss is zero, and values that differ are equal: float32 rounds so."""
_CURVES = (
    ("reward", "rollout/raw_reward"),
    ("length", "rollout/response_len/mean"),
    ("loss", "train/loss"),
    ("gradient", "train/grad_norm"),
    ("log-prob gap", "train/train_rollout_logprob_abs_diff"),
)
_POLICY_ROWS = PolicyRows(metric for _, metric in _CURVES)
_PARTS = ("rollout_time", "log_probs_time", "ref_log_probs_time", "actor_train_time")
Steps = dict[int, dict[str, Any]]


def run(words: Sequence[str]) -> int:
    """Prints curves of one line each, and what has gone wrong."""
    parser = argparse.ArgumentParser("slime report", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", help="a run's directory, or its file of metrics")
    place = parser.parse_args(words).run
    try:
        record = _record_of(place)
        hidden = {"reward"} if record and record.flags.get("loss_type") == "sft_loss" else set()
        path = metrics_file(place, record)
        print(page(place, read_metrics(path), hidden))
        for alert in alerts_of(read_rows(path), max_staleness(record)):
            print(f"  ! {alert}")
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {place}: no metrics that can be read ({error})", file=sys.stderr)
        return 2
    return 0


def _record_of(place: str) -> Record | None:
    """The record in a run's directory; None for a run of another version, or a file of metrics."""
    if not Path(place).is_dir():
        return None
    try:
        return read_record(place)
    except UsageError:
        return None


def page(title: str, metrics: dict[str, Steps], hidden: Collection[str] = ()) -> str:
    """The report, without hidden curves; steps that have no such value are left out of a curve."""
    rollouts, steps = metrics["rollout"], metrics["train"]
    lines = [f"{title}: {len(rollouts)} rollouts, {len(steps)} optimizer steps{_duration(rollouts)}", ""]
    for name, metric in _CURVES:
        if name in hidden:  # the rewards of imitation, which has none
            continue
        axis = steps if metric.startswith("train/") else rollouts
        lines += _curve(name, _numbers(metric, axis.values()))
        of_policies: dict[str, list[Any]] = defaultdict(list)
        for row in axis.values():
            for policy, own in _POLICY_ROWS.split(row).items():
                of_policies[policy].append(own)
        for policy, found in of_policies.items():
            lines += _curve(name, _numbers(metric, found), f"  {policy}")
    lines += _evaluations(metrics["eval"])
    return "\n".join([*lines, *_times(rollouts)])


def _numbers(metric: str, rows: Iterable[Mapping[str, Any]]) -> list[float]:
    return [row[metric] for row in rows if _is_number(row.get(metric))]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _duration(rollouts: Steps) -> str:
    seconds = sum(row.get("perf/step_time", 0.0) for row in rollouts.values())
    return f" in {duration(seconds)}" if seconds else ""


def _curve(name: str, values: Sequence[float], of: str = "") -> Iterable[str]:
    if name == "loss":
        values = [0.0 if abs(value) <= _ROUNDING else value for value in values]
    if values:
        yield f"  {name:<14} {values[0]:>9.4g} -> {values[-1]:<9.4g} {sparkline(values)}{of}"


def sparkline(values: Sequence[float]) -> str:
    """A curve in one line; many values are taken together."""
    width = min(len(values), _WIDTH)
    edges = [round(index * len(values) / width) for index in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = high - low if high - low > _ROUNDING else 1.0
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1))] for mean in means)


def _evaluations(evals: Steps) -> Iterable[str]:
    names = sorted(
        {name for row in evals.values() for name in row if name.count("/") == 1 and "-" not in name}
    )
    for name in names:
        found = {step: row[name] for step, row in evals.items() if _is_number(row.get(name))}
        if found and name.startswith("eval/"):
            told = ", ".join(f"{value:.3f} at {step}" for step, value in list(found.items())[-6:])
            yield f"  {name.removeprefix('eval/'):<14} {told}"


def _times(rollouts: Steps) -> Iterable[str]:
    parts = {}
    for part in _PARTS:
        values = [row[f"perf/{part}"] for row in rollouts.values() if _is_number(row.get(f"perf/{part}"))]
        if values:
            parts[part.removesuffix("_time").replace("_", " ")] = sum(values) / len(values)
    if parts:
        told = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items())
        yield f"  a step's time  {told}"
