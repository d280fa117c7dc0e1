"""Groups of which nothing comes, one after the other: too many of them end the run."""

from collections import Counter
from typing import Any

from slime.rollout.attempts import flatten
from slime.rollout.base_types import RolloutError, name_samples
from slime.rollout.generation import is_given_up
from slime.rollout.ungraded import FAILURE, nothing_is_graded

MAX_IN_A_ROW = 20
"""Times the groups that are under way at once."""


class NothingToTrainOn(RolloutError):
    """Groups are generated, and none is of use: the batch would never be full."""


class FruitlessGroups:
    """Counts groups in a row that were given up or of which nothing could be graded.

    Args:
        under_way: how many groups are generated at once.
    """

    def __init__(self, under_way: int) -> None:
        self._most = MAX_IN_A_ROW * under_way
        self._counts = Counter[str]()

    @property
    def in_a_row(self) -> int:
        return self._counts.total()

    def see(self, group: list[Any]) -> None:
        """Counts a group that came back.

        Raises:
            NothingToTrainOn: it is the last of too many in a row of which nothing came.
        """
        if is_given_up(group):
            self._counts["had a sample that its generate function aborted"] += 1
        elif nothing_is_graded(group):
            self._counts["could not be graded"] += 1
        else:
            self._counts.clear()
        if self.in_a_row >= self._most:
            raise NothingToTrainOn(self._told(group))

    def _told(self, group: list[Any]) -> str:
        samples = flatten(group)
        whys = " and ".join(
            what if count == self.in_a_row else f"{count} {what}" for what, count in self._counts.items()
        )
        failures = [sample.metadata[FAILURE] for sample in samples if FAILURE in sample.metadata]
        why = f" ({failures[0]})" if failures else ""
        last = f"the last one {name_samples(samples)}{why}"
        return f"{self.in_a_row} groups in a row {whys}, {last}: the batch would never be full"
