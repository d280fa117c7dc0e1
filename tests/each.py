"""Many cases in one test, where each is a row of a table and starts nothing of its own.

    def test_sizes_are_positive(refusal):
        def check(flag):
            assert refusal([flag, "0"]).startswith(flag)

        hold_each(FLAGS, check)

Every case runs; what the test says when it fails is one line for each case that does not hold.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")
_LONGEST_LINE = 400
_STOPS = (Exception, SystemExit, pytest.fail.Exception)


def hold_each(
    cases: Iterable[Case], check: Callable[[Case], Any], name: Callable[[Case], str] = str, least: int = 1
) -> None:
    """Holds every case to ``check``, which raises where one does not hold.

    Args:
        name: what a case is called in its line.
        least: how many there must be, lest an empty table pass.
    """
    count = 0
    wrong = []
    for case in cases:
        count += 1
        try:
            check(case)
        except _STOPS as error:
            wrong.append(f"{name(case)}: {_one_line(error)}")
    if wrong:
        pytest.fail("\n".join([f"{len(wrong)} of {count} cases do not hold:", *wrong]), pytrace=False)
    assert count >= least, f"{count} cases, wanted {least} or more"


def _one_line(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, AssertionError):
        text = text.partition("\n")[0]  # what pytest adds below it are the values that led there
    elif not isinstance(error, pytest.fail.Exception):
        text = f"{type(error).__name__}: {text}"
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]} ..."
