"""The warnings of optimizer steps that go wrong without an error, from the metrics of a run."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger(__name__)

LARGEST_GAP = 0.1  # nats per token
USUAL_GAP = 0.01  # nats per token; with bfloat16 engines 0.001 to 0.01 is usual
LARGEST_KL = 0.5  # nats per token within the steps of one rollout
LEAST_ENTROPY = 0.1  # of that of the first step
CURVES = {
    "gap": "train/train_rollout_logprob_abs_diff",
    "kl": "train/ppo_kl",
    "entropy": "train/entropy_loss",
}
"""The metric in which each fault is seen."""
ADVICE = {
    "gap": "see --use-tis for a correction",
    "kl": "wanted: a smaller --lr or fewer steps per rollout",
    "entropy": "wanted: a smaller --lr, --entropy-coef, or a larger --eps-clip-high",
}
"""What to do about each."""
Row = Mapping[str, Any]


class SilentSteps:
    """A sink that only looks at metrics, and tells of each fault once for a row of steps that have it."""

    def __init__(self, warn: Callable[[str], None] = logger.warning) -> None:
        self._warn = warn
        self._told: set[str] = set()
        self._first: dict[str, float] = {}
        self._reward: float | None = None

    def write(self, axis: str, step: int, metrics: Row) -> None:
        """Tells what is wrong with a row."""
        for kind, text in self.look(axis, metrics).items():
            if text and kind not in self._told:
                self._warn(f"step {step + 1}: {text} ({ADVICE[kind]})")
            (self._told.add if text else self._told.discard)(kind)

    def look(self, axis: str, metrics: Row) -> dict[str, str | None]:
        """Returns what is wrong with a row of an optimizer step, if anything, by kind.

        Of other rows it keeps the reward.
        """
        for name in ("rollout/raw_reward", "train/entropy_loss"):
            if isinstance(value := metrics.get(name), int | float):
                self._first.setdefault(name, value)
        self._reward = metrics.get("rollout/raw_reward", self._reward)
        if axis != "train":
            return {}
        return {"gap": _gap(metrics), "kl": _kl(metrics), "entropy": self._entropy(metrics)}

    def close(self) -> None:
        """Nothing is open."""

    def _entropy(self, metrics: Row) -> str | None:
        """Answers that become alike while the reward does not rise: there is nothing left to learn from."""
        first, now = self._first.get("train/entropy_loss", 0.0), metrics.get("train/entropy_loss", 1.0)
        risen = (self._reward or 0.0) > self._first.get("rollout/raw_reward", 0.0)
        if first <= 0 or now >= LEAST_ENTROPY * first or risen:
            return None
        return (
            f"the entropy has fallen from {first:.3g} to {now:.3g} nats per token while the reward did not "
            "rise: answers become alike"
        )


def _gap(metrics: Row) -> str | None:
    gap = metrics.get(CURVES["gap"], 0.0)
    if gap <= LARGEST_GAP:
        return None
    return (
        f"trainer and engines are {gap:.3g} nats per token apart about the same tokens (usual: below "
        f"{USUAL_GAP}), so what is trained is not what was sampled"
    )


def _kl(metrics: Row) -> str | None:
    kl = metrics.get(CURVES["kl"], 0.0)
    if abs(kl) <= LARGEST_KL:
        return None
    return f"the policy has moved by a KL of {kl:.3g} nats per token within one rollout"
