"""How many engines answer the prompts now, for whoever limits requests; the rollout manager tells.

engine_count.follow(fleet.answering)   # from then on, until it is forgotten, or the fleet is gone
engine_count.now(otherwise=4)
"""

import weakref
from collections.abc import Callable


class EngineCount:
    """One per process; may be asked from any thread."""

    def __init__(self) -> None:
        self._counter: weakref.WeakMethod[Callable[[], int]] | None = None

    def follow(self, counter: Callable[[], int]) -> None:
        """Has a method asked, until its object is gone."""
        self._counter = weakref.WeakMethod(counter)

    def forget(self, counter: Callable[[], int]) -> None:
        """Has it asked no longer, if it is the one that is."""
        if self._counter is not None and self._counter() == counter:
            self._counter = None

    def now(self, otherwise: int) -> int:
        """Engines that serve, at least 1.

        Args:
            otherwise: how many there are where nobody counts them.
        """
        counter = None if self._counter is None else self._counter()
        return max(1, otherwise if counter is None else counter())


engine_count = EngineCount()
