"""What rules need to know of a metric so far, at a cost that does not grow with its steps."""

from collections import deque
from math import inf
from statistics import fmean

_SMOOTH = 5  # steps of which means are taken
_LARGEST = 1e100  # of a value: sums of larger ones would be infinite


class Series:
    """The values of one metric, in the order of their steps.

    Attributes:
        best: the highest mean of a few steps, minus infinity before there are so many.
        change_at_best: how much a value differed from the one before, on average, up to there.
        early: the mean of the first few steps.
        highest: of all values.
    """

    def __init__(self) -> None:
        self.count = 0
        self.last_step = -1
        self.best, self.highest = -inf, -inf
        self.change_at_best = 0.0
        self.early: float | None = None
        self._recent: deque[float] = deque(maxlen=_SMOOTH)
        self._changes = 0.0

    @property
    def previous(self) -> float | None:
        """The value of the last step; None without one."""
        return self._recent[-1] if self._recent else None

    def add(self, step: int, value: float) -> None:
        """Adds the value of the next step."""
        value = max(-_LARGEST, min(_LARGEST, value))
        if self._recent:
            self._changes += abs(value - self._recent[-1])
        self._recent.append(value)
        self.count, self.last_step = self.count + 1, step
        self.highest = max(self.highest, value)
        if len(self._recent) < _SMOOTH:
            return
        mean = fmean(self._recent)
        if self.early is None:
            self.early = mean
        if mean > self.best:
            self.best, self.change_at_best = mean, self._changes / (self.count - 1)

    def go_back_to(self, step: int) -> None:
        """Forgets the last steps, as a run that resumes writes this one and what follows again.

        What was best stays: the run has been there.
        """
        self._recent.clear()
        self.last_step = step - 1
