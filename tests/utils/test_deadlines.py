"""Calls that may never return."""

import threading

import pytest

from slime.utils.deadlines import within


def test_what_returns_in_time_is_what_it_was():
    assert within(300, "work", lambda: 3) == 3
    with pytest.raises(KeyError, match="own"):
        within(300, "work", lambda: {}["own"])


def test_an_error_of_its_own_is_not_taken_for_the_deadline():
    def late():
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        within(300, "work", late)


def test_what_does_not_return_is_named_and_left_behind():
    hold = threading.Event()
    with pytest.raises(TimeoutError, match=r"^access to the disk has not ended after 0\.05 s$"):
        within(0.05, "access to the disk", hold.wait)
    (left,) = (thread for thread in threading.enumerate() if thread.name == "access to the disk")
    assert left.daemon
    hold.set()
    left.join(300)
