"""The figures of a quickstart, from its metrics files."""

import statistics
from collections.abc import Mapping
from typing import Any

from tools.quickstart.layout import GREEDY, SAMPLED

Steps = Mapping[int, Mapping[str, Any]]
Metrics = Mapping[str, Steps]

STEP_PHASES = {
    "generate": ("perf/rollout_time",),
    "log-probs": ("perf/log_probs_time", "perf/ref_log_probs_time"),
    "train": ("perf/actor_train_time",),
    "weight sync": ("perf/update_weights_time",),
}
_GAP = "train/train_rollout_logprob_abs_diff"


def summarise(
    metrics: Metrics, phase_seconds: Mapping[str, float], *, seed: int, wall_s: float, algorithm: str = "grpo"
) -> dict[str, Any]:
    """The content of summary.json.

    Args:
        metrics: of the RL phase, as `slime.observability.jsonl.read_metrics` gives them.
        phase_seconds: wall seconds of each phase of the quickstart.

    Raises:
        ValueError: the metrics lack the evaluation before or after training, or no RL step was measured.
    """
    evals = metrics["eval"]
    if len(evals) < 2 or min(evals) != 0:
        raise ValueError(f"evaluations at {sorted(evals)}: wanted one at 0 and one after training")
    before, after = evals[0], evals[max(evals)]
    # The first steps may be a critic's alone, which has no log-probs.
    first = next((row for _, row in sorted(metrics["train"].items()) if _GAP in row), None)
    if first is None:
        raise ValueError(f"none of {len(metrics['train'])} RL steps has {_GAP}")
    return {
        "eval_sampled_sft": before[f"eval/{SAMPLED}"],
        "eval_greedy_sft": before[f"eval/{GREEDY}"],
        "eval_sampled_rl": after[f"eval/{SAMPLED}"],
        "eval_greedy_rl": after[f"eval/{GREEDY}"],
        "first_logprob_abs_diff": first[_GAP],
        "wall_s": wall_s,
        "phase_s": dict(phase_seconds),
        "rl_step_s": mean_step_seconds(metrics["rollout"]),
        "num_rollouts": len(metrics["rollout"]),
        "seed": seed,
        "algorithm": algorithm,
    }


def mean_step_seconds(rollouts: Steps) -> dict[str, float]:
    """Mean wall seconds of each part of an RL step; "rest" is what no part accounts for.

    Evaluations and checkpoints happen in a few steps only, so the steps that have them count without them.
    """
    parts: dict[str, list[float]] = {name: [] for name in [*STEP_PHASES, "rest"]}
    for row in rollouts.values():
        if "perf/step_time" not in row:
            continue
        seconds = {name: sum(row.get(key, 0.0) for key in keys) for name, keys in STEP_PHASES.items()}
        occasional = row.get("perf/eval_time", 0.0) + row.get("perf/save_model_time", 0.0)
        seconds["rest"] = max(0.0, row["perf/step_time"] - occasional - sum(seconds.values()))
        for name, value in seconds.items():
            parts[name].append(value)
    # With one optimizer step per rollout the trainer needs no log-prob pass of its own, for instance.
    return {name: statistics.fmean(values) for name, values in parts.items() if any(values)}
