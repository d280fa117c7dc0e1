"""The log of one of several policies that a run trains."""

from collections.abc import Mapping
from typing import Any

from slime.observability.run_log import RunLog


def of_policy(policy: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics under names that say whose they are: ``train/loss`` becomes ``train/POLICY/loss``."""
    return {f"{axis}/{policy}/{name}": value for axis, name, value in _parted(metrics)}


def _parted(metrics: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    return [(*name.split("/", 1), value) for name, value in metrics.items()]  # type: ignore[misc]


class PolicyLog(RunLog):
    """Writes where the run's log writes, under names of the policy, and counts steps of its own."""

    def __init__(self, run: RunLog, policy: str) -> None:
        super().__init__(run.tracker, run.trace)
        self._run, self._policy = run, policy

    def count(self, name: str, amount: float) -> None:
        """Adds to the policy's number of the current step, and to that of all policies."""
        self._run.count(name, amount)
        self._run.count(f"{self._policy}/{name}", amount)

    def rollout(self, rollout_id: int, metrics: Mapping[str, Any]) -> None:
        self._run.rollout(rollout_id, of_policy(self._policy, metrics))

    def _train_row(self, number: int, metrics: Mapping[str, Any]) -> None:
        super()._train_row(number, of_policy(self._policy, metrics))
