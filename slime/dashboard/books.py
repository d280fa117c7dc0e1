"""The books on groups of samples, of a run's metrics: as they stood after each rollout, and what it did.

What a rollout was given has a place in it: groups that were carried over from the one before, and those that
were issued, are those that it trained, filtered and dropped, and those that are still buffered or leased.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from slime.dashboard.metrics import MAX_POINTS, parts

_FATES, _PLACES = ("trained", "filtered", "dropped"), ("buffered", "leased")
_ACCOUNTS = ("issued", *_FATES, *_PLACES, "unbalanced")
COLUMNS = [f"rollout/ledger/{account}" for account in _ACCOUNTS]
"""The metrics that are read."""
Column = dict[int, float | None]
Row = tuple[float, ...]
"""A step, and a value for each account; the last is how many groups have not exactly one place."""


def told_of(columns: Sequence[Column], last: int) -> dict[str, Any]:
    """Returns the books of these `COLUMNS`.

    Args:
        last: rollouts that are told one by one.

    Returns:
        ``now``, the row of the latest rollout, None where nothing is recorded; ``last`` and ``curve``, rows
        of rollouts, with what was carried over before what was issued, and of the curve `MAX_POINTS` at
        most; ``unbalanced``, the first and the latest rollout after which they did not balance, and how many.
    """
    standing = list(_standing(columns))
    rollouts = list(_of_rollouts(standing))
    wrong = [int(step) for step, *_, unbalanced in standing if unbalanced]
    return {
        "now": standing[-1] if standing else None,
        "last": rollouts[-last:],
        "curve": list(_thinned(rollouts)),
        "unbalanced": {"first": wrong[0], "last": wrong[-1], "count": len(wrong)} if wrong else None,
    }


def _standing(columns: Sequence[Column]) -> Iterator[Row]:
    """The books after each rollout that has all of them; added up anew, as files may be anybody's."""
    for step in sorted(set(columns[0]).intersection(*columns[1:])):
        values = [value for column in columns if (value := column[step]) is not None]
        if len(values) == len(columns):
            issued, trained, filtered, dropped, buffered, leased, unbalanced = values
            places = trained + filtered + dropped + buffered + leased
            yield step, *values[:-1], max(abs(unbalanced), abs(issued - places))


def _of_rollouts(standing: Sequence[Row]) -> Iterator[Row]:
    """Step, what was carried over and issued, and each account; nothing of a first row that has a past."""
    nothing = (-1.0, *(0.0 for _ in _ACCOUNTS))
    began = [nothing] if standing and standing[0][0] == 0 else []
    for then, now in pairwise([*began, *standing]):
        if now[1] >= then[1]:  # else it began anew
            fates = now[2] - then[2], now[3] - then[3], now[4] - then[4]
            yield now[0], then[5] + then[6], now[1] - then[1], *fates, *now[5:]


def _thinned(rows: Sequence[Row]) -> Iterator[list[float]]:
    """Yields as many rows as a screen shows, each the mean of those in its place; the last stays as it is."""
    for part in parts(rows, MAX_POINTS):
        (step, *_), *columns = zip(*part, strict=True)
        yield [step, *(sum(column) / len(part) for column in columns)]
