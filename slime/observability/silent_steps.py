"""The warnings of optimizer steps that go wrong without an error, from the metrics of a run."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger(__name__)

LARGEST_GAP = 0.1  # nats per token; with bfloat16 engines 0.001 to 0.01 is usual
LARGEST_KL = 0.5  # nats per token within the steps of one rollout
LEAST_ENTROPY = 0.1  # of that of the first step
Row = Mapping[str, Any]


class SilentSteps:
    """A sink that only looks at metrics, and tells of each fault once for a row of steps that have it."""

    def __init__(self, warn: Callable[[str], None] = logger.warning) -> None:
        self._warn = warn
        self._told: set[str] = set()
        self._first: dict[str, float] = {}
        self._reward: float | None = None

    def write(self, axis: str, step: int, metrics: Row) -> None:
        """Looks at a row of an optimizer step; of rollouts it keeps the reward."""
        for name in ("rollout/raw_reward", "train/entropy_loss"):
            if isinstance(value := metrics.get(name), int | float):
                self._first.setdefault(name, value)
        self._reward = metrics.get("rollout/raw_reward", self._reward)
        if axis != "train":
            return
        found = {"gap": _gap(metrics), "kl": _kl(metrics), "entropy": self._entropy(metrics)}
        for kind, text in found.items():
            if text and kind not in self._told:
                self._warn(f"step {step + 1}: {text}")
            (self._told.add if text else self._told.discard)(kind)

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
            "rise: answers become alike (wanted: a smaller --lr, --entropy-coef, or a larger --eps-clip-high)"
        )


def _gap(metrics: Row) -> str | None:
    gap = metrics.get("train/train_rollout_logprob_abs_diff", 0.0)
    if gap <= LARGEST_GAP:
        return None
    return (
        f"trainer and engines are {gap:.3g} nats per token apart about the same tokens (usual: below 0.01), "
        "so what is trained is not what was sampled (see --use-tis for a correction)"
    )


def _kl(metrics: Row) -> str | None:
    kl = metrics.get("train/ppo_kl", 0.0)
    if abs(kl) <= LARGEST_KL:
        return None
    return (
        f"the policy has moved by a KL of {kl:.3g} nats per token within one rollout (wanted: a smaller --lr "
        "or fewer steps per rollout)"
    )
