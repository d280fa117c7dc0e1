"""Saves that failed: a disk that is full for a while does not end a run, one that stays full does."""

import logging
from collections.abc import Sequence
from itertools import zip_longest

logger = logging.getLogger(__name__)


class FailedSaves:
    """Counts the saves in a row that failed.

    Args:
        most: so many may fail in a row.
    """

    def __init__(self, most: int) -> None:
        self._most, self._in_a_row = most, 0

    def note(self, rollout_id: int, of_roles: Sequence[Sequence[str | None]], last: bool) -> None:
        """Takes the outcomes of a rollout's save, and of earlier ones that were written in the background.

        Args:
            of_roles: for each of those who save why a save failed, None if it is complete, in their order;
                empty if nothing is known yet.
            last: nothing is saved after it.

        Raises:
            RuntimeError: the run must not go on without a checkpoint.
        """
        ended = [next(filter(None, of_one), None) for of_one in zip_longest(*of_roles)]
        if ended:
            self._count(ended)
        reason = next(filter(None, ended), None)
        if reason is None:
            return
        if last and any(of_role[-1] is not None for of_role in of_roles if of_role):
            raise RuntimeError(f"{reason}; it was the last save of the run")
        if self._in_a_row > self._most:
            raise RuntimeError(
                f"{reason}; {self._in_a_row} saves in a row failed (--max-failed-saves {self._most})"
            )
        logger.warning(
            "rollout %d: the run goes on without this checkpoint, %d of at most %d in a row "
            "(--max-failed-saves): %s",
            *(rollout_id, self._in_a_row, self._most, reason),
        )

    def _count(self, ended: Sequence[str | None]) -> None:
        """Failures told at once may be of one save, of its checkpoint and its export: they count once."""
        if ended[-1] is None:
            self._in_a_row = 0
        else:
            self._in_a_row = 1 if None in ended else self._in_a_row + 1
