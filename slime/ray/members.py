"""Who belongs to a fleet, for the one that takes its place when the rollout side starts again."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Members:
    """Places by the numbers of their engines, without those of engines that leave, or are to.

    Attributes:
        number: of several that are told, the newest has the largest.
        places: of engines that serve, or did until they died.
        joining: of engines that have not served yet.
        notices: by place, the seconds until it is taken away.
    """

    number: int
    places: frozenset[int]
    joining: frozenset[int]
    notices: Mapping[int, float]


class KeptMembers:
    """What the driver was told last; from any thread."""

    def __init__(self) -> None:
        self._newest: Members | None = None
        self._told_at = 0.0
        self._changing = threading.Lock()

    def take(self, told: tuple[Any, Members]) -> Any:
        """Takes note of who belongs to it, which comes with each answer, and returns the answer."""
        answer, members = told
        with self._changing:
            if self._newest is None or members.number > self._newest.number:
                self._newest, self._told_at = members, time.monotonic()
        return answer

    def now(self) -> Members | None:
        """With the seconds that notices have left; None where nothing was told."""
        with self._changing:
            if self._newest is None:
                return None
            passed = time.monotonic() - self._told_at
            left = {rank: seconds - passed for rank, seconds in self._newest.notices.items()}
            return replace(self._newest, notices=left)
