"""For how long somebody has given no answer, as far as it was asked."""

from types import SimpleNamespace

import pytest

from slime.processes import silence
from slime.processes.silence import Silence


@pytest.fixture
def unanswered(monkeypatch):
    """``unanswered(began, until)``: the seconds of silence after a question of that time; and the silence."""
    measured = Silence()
    now = lambda seconds: monkeypatch.setattr(
        silence, "time", SimpleNamespace(monotonic=lambda: 1000.0 + seconds)
    )

    def ask(began, until):
        now(until)
        return measured.seconds(1000.0 + began)

    ask.answered = lambda seconds: (now(seconds), measured.end())
    return ask


def test_it_lasts_from_the_first_question_or_from_the_last_answer(unanswered):
    assert [unanswered(began, began + 10) for began in (0, 12, 24)] == [10, 22, 34]
    unanswered.answered(36)
    assert [unanswered(began, began + 10) for began in (38, 50)] == [12, 24]


def test_the_time_in_which_nobody_asked_is_no_silence(unanswered):
    unanswered.answered(0)
    assert [unanswered(began, began + 10) for began in (600, 612)] == [10, 22]
    assert unanswered(640, 650) == 10  # 18 s after the last question


def test_a_question_that_was_asked_meanwhile_is_a_part_of_it(unanswered):
    assert unanswered(0, 60) == 60
    assert unanswered(5, 65) == 65


def test_a_question_that_waits_for_longer_than_a_later_one_is_a_part_of_it(unanswered):
    unanswered.answered(-5)
    assert unanswered(30, 40) == 10
    assert unanswered(0, 60) == 60
    unanswered.answered(61)
    assert unanswered(2, 62) == 1
