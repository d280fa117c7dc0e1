"""Whether answers are made between rollouts too, for whoever counts requests; who makes them tells.

background_generation.begin(worker)   # from then on, until it ends, or the worker is gone
background_generation.goes_on
"""

import weakref


class BackgroundGeneration:
    """One per process; may be told and asked from any thread."""

    def __init__(self) -> None:
        self._workers: weakref.WeakSet[object] = weakref.WeakSet()

    def begin(self, worker: object) -> None:
        """Takes note of a worker that makes answers, whether a rollout waits for them or not."""
        self._workers.add(worker)

    def end(self, worker: object) -> None:
        """Forgets a worker that makes none any more, or never did."""
        self._workers.discard(worker)

    @property
    def goes_on(self) -> bool:
        """Whether anybody does."""
        return bool(self._workers)


background_generation = BackgroundGeneration()
"""The one of this process."""
