"""For how long somebody has given no answer, as far as it was asked."""

import math
import time

LONGEST_GAP_S = 15.0
"""The longest time between two questions that says something about what was between them."""


class Silence:
    """Measures the time since the last answer.

    It begins anew where nobody asked for a while: who asks may have been stopped (SIGSTOP), and an answer
    would have come all the time.
    """

    def __init__(self, longest_gap_s: float = LONGEST_GAP_S) -> None:
        self._longest_gap_s = longest_gap_s
        self._since: float | None = None
        self._asked, self._answered = 0.0, -math.inf

    def end(self) -> None:
        """Takes note of an answer that has come just now."""
        self._since = self._asked = self._answered = time.monotonic()

    def seconds(self, began: float) -> float:
        """Takes note that a question got no answer until now; returns the seconds of silence.

        Args:
            began: when it was asked, on the monotonic clock.
        """
        if self._since is None or began - self._asked > self._longest_gap_s:
            self._since = began
        else:  # a question that was asked before, and waited for longer
            self._since = max(min(self._since, began), self._answered)
        self._asked = time.monotonic()
        return self._asked - self._since
