"""The books of a run, rollout by rollout, as its metrics have them."""

import pytest

from slime.dashboard.books import COLUMNS, told_of
from slime.dashboard.metrics import MAX_POINTS
from tests.dashboard.planted import books_after

NAMES = [column.rpartition("/")[2] for column in COLUMNS]
Books = dict[int, dict[str, float | None]]


def told(books: Books, last: int = 20):
    return told_of([{step: row[name] for step, row in books.items() if name in row} for name in NAMES], last)


def test_what_each_rollout_was_given_is_what_became_of_it() -> None:
    books: Books = {rollout: dict(books_after(rollout)) for rollout in range(50)}
    found = told(books)
    assert found["now"] == (49, *books[49].values()) and found["unbalanced"] is None
    assert len(found["last"]) == 20 and [row[0] for row in found["curve"]] == [*range(50)]
    assert found["curve"][0] == [0, 0, 10, 8, 0, 0, 0, 2, 0]
    for _, carried, issued, trained, filtered, dropped, buffered, leased, unbalanced in found["curve"]:
        assert carried + issued == trained + filtered + dropped + buffered + leased
        assert trained == 8 and filtered in (0, 1) and dropped in (0, 3) and unbalanced == 0
    assert sum(row[2] for row in found["curve"]) == books[49]["issued"]


def test_means_of_many_rollouts_balance_too() -> None:
    found = told({rollout: dict(books_after(rollout)) for rollout in range(10 * MAX_POINTS)})
    assert len(found["curve"]) == MAX_POINTS
    for _, carried, issued, *places, _ in found["curve"]:
        assert carried + issued == pytest.approx(sum(places))


def test_books_that_do_not_balance_are_told_with_their_rollouts_also_of_a_run_that_denies_it() -> None:
    books: Books = {rollout: dict(books_after(rollout)) for rollout in range(9)}
    for rollout in (4, 5):
        books[rollout]["unbalanced"] = 2
    books[8]["trained"] -= 3
    found = told(books)
    assert found["unbalanced"] == {"first": 4, "last": 8, "count": 3}
    assert [row[-1] for row in found["curve"]] == [0, 0, 0, 0, 2, 2, 0, 0, 3] and found["now"][-1] == 3


def test_a_rollout_whose_past_is_not_known_has_no_row() -> None:
    resumed = {rollout: dict(books_after(rollout)) for rollout in range(7, 10)}
    assert [row[0] for row in told(resumed)["last"]] == [8, 9]
    anew = resumed | {10: dict(books_after(0)), 11: dict(books_after(1))}
    found = told(anew)
    assert [row[0] for row in found["last"]] == [8, 9, 11] and found["now"][0] == 11
    assert told(resumed, last=1)["last"] == [told(resumed)["last"][1]]


@pytest.mark.parametrize("row", [{}, {"issued": 3.0}, dict.fromkeys(NAMES)])
def test_what_has_no_books_has_none(row: dict[str, float | None]) -> None:
    assert told({0: row, 1: row}) == {"now": None, "last": [], "curve": [], "unbalanced": None}
