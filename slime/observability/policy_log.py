"""The log of one of several policies that a run trains."""

import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from slime.observability.run_log import RunLog
from slime.observability.silent_steps import SilentSteps

logger = logging.getLogger(__name__)


def of_policy(policy: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics under names that say whose they are: ``train/loss`` becomes ``train/POLICY/loss``."""
    return {f"{axis}/{policy}/{name}": value for axis, name, value in _parted(metrics)}


def _parted(metrics: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    return [(*name.split("/", 1), value) for name, value in metrics.items()]  # type: ignore[misc]


class PolicyLog(RunLog):
    """Writes where the run's log writes, under names of the policy, and counts steps of its own."""

    def __init__(self, run: RunLog, policy: str) -> None:
        super().__init__(run.tracker, run.sinks)
        self._run, self._policy = run, policy

    def count(self, name: str, amount: float) -> None:
        """Adds to the policy's number of the current step, and to that of all policies."""
        self._run.count(name, amount)
        self._run.count(f"{self._policy}/{name}", amount)

    def rollout(self, rollout_id: int, metrics: Mapping[str, Any]) -> None:
        self._run.rollout(rollout_id, of_policy(self._policy, metrics))

    def _train_row(self, number: int, metrics: Mapping[str, Any]) -> None:
        super()._train_row(number, of_policy(self._policy, metrics))


class SilentStepsOfPolicy(SilentSteps):
    """Looks at the rows of one policy, and says whose step goes wrong."""

    def __init__(self, policy: str) -> None:
        super().__init__(partial(logger.warning, "policy %s: %s", policy))
        self._middle = f"/{policy}/"

    def write(self, axis: str, step: int, metrics: Mapping[str, Any]) -> None:
        parted = [(name.partition(self._middle), value) for name, value in metrics.items()]
        own = {f"{axis}/{name}": v for (axis, _, name), v in parted if name and "/" not in axis}
        if own:
            super().write(axis, step, own)


def silent_steps(policies: Iterable[str]) -> list[SilentSteps]:
    """What looks at the optimizer steps of a run: of one model, or of each policy."""
    return [SilentStepsOfPolicy(policy) for policy in policies] or [SilentSteps()]
