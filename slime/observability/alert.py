"""A rule over the rows of metrics, and what is told when it has fired."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from slime.observability.series import Series

FAULTY_PART = 0.9  # of the samples or groups, from which on a fault is one of the run
Look = Callable[[float, Series], str | None]


@dataclass(frozen=True)
class Rule:
    """A fault, and how rows of metrics show it.

    Attributes:
        metric: the curve in which it is seen; ``<model>`` stands for any word.
        advice: what to look at, and what to change.
        look: what is wrong with a value, and the steps before it; None where nothing is.
        rows: in so many steps, one after the other, before it counts.
    """

    name: str
    metric: str
    advice: str
    look: Look | None = None
    rows: int = 1


@dataclass(frozen=True)
class Alert:
    """A rule that has fired.

    Attributes:
        metric: the curve that shows it.
        step: where it was first seen.
        last: where it was last seen.
        times: how often it came, having been gone in between.
        is_over: whether a later step did not show it.
    """

    rule: str
    metric: str
    advice: str
    found: str
    step: int
    last: int
    times: int = 1
    is_over: bool = False

    def __str__(self) -> str:
        """One line, with steps as they are in the file of metrics."""
        return f"{self.rule} ({self.when}): {self.found}. {self.advice}"

    @property
    def when(self) -> str:
        """Its steps in words, which count from 0."""
        axis = "optimizer step" if self.metric.startswith("train/") else "rollout"
        often = f", {self.times} times" if self.times > 1 else ""
        if not self.is_over:
            return f"since {axis} {self.step}{often}"
        to = f" to {self.last}" if self.last > self.step else ""
        return f"{axis} {self.step}{to}{often}"


@dataclass
class RuleState:
    """A rule's state for one metric: since when it is seen without a gap, and what has come of that."""

    rule: Rule
    metric: str
    since: int | None = None
    rows: int = 0
    judged: int = -1
    alert: Alert | None = None

    def judge(self, step: int, found: str | None) -> None:
        if step <= self.judged:
            self._go_back_to(step)
        self.judged = step
        if found is None:
            self.since, self.rows = None, 0
            self.alert = self.alert and replace(self.alert, is_over=True)
            return
        self.since, self.rows = step if self.since is None else self.since, self.rows + 1
        if self.rows < self.rule.rows:
            return
        if self.alert is None:
            self.alert = Alert(self.rule.name, self.metric, self.rule.advice, found, self.since, step)
        elif self.alert.is_over:
            times = self.alert.times + 1
            self.alert = replace(self.alert, found=found, last=step, times=times, is_over=False)
        else:
            self.alert = replace(self.alert, found=found, last=step)

    def _go_back_to(self, step: int) -> None:
        """Forgets what came at this step or later, which is written again."""
        if self.alert and self.alert.step >= step:
            self.alert = None
        self.since, self.rows = None, 0
