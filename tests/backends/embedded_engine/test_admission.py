"""Which waiting prompts are computed together, at the edges of each limit."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from slime.backends.embedded_engine.admission import Admission, Limits
from slime.backends.embedded_engine.sampling_params import SamplingParams
from slime.backends.embedded_engine.sequence import LogprobOptions, Sequence
from slime.utils.model_inputs import SequenceInputs

LIMITS = Limits(rows=9, tokens=1000, chunk=12, context=100)


def started(lengths: list[int], limits: Limits = LIMITS, single: bool = False) -> list[int]:
    """The lengths of the prompts, all different, that are computed first, each row for 2 tokens more."""
    waiting = deque(
        Sequence(str(i), SequenceInputs([i] * length), SamplingParams(max_new_tokens=2), LogprobOptions(), i)
        for i, length in enumerate(lengths)
    )
    plan = Admission(limits, [], single).plan(waiting)
    assert not plan.copies
    found = [sequence.length for sequence in (*plan.fresh, *filter(None, [plan.long]))]
    assert found + [sequence.length for sequence in waiting] == lengths
    return found


@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [
        ([4, 4, 4], [4, 4, 4]),  # 3 x 4 are just the chunk
        ([4, 4, 5], [4, 4]),  # 3 x 5 are more, padding counted
        ([6, 1, 1], [6, 1]),
        ([1, 6, 1], [1, 6]),
        ([12, 1], [12]),
        ([13, 1], [13]),  # longer than a chunk, and so by itself
        ([1, 13], [1]),
    ],
)
def test_prompts_that_are_computed_together_fit_into_a_chunk(lengths: list[int], wanted: list[int]) -> None:
    assert started(lengths) == wanted


def test_rows_and_tokens_have_limits_of_their_own() -> None:
    assert started([1, 1, 1], replace(LIMITS, rows=2)) == [1, 1]
    assert started([1, 1, 1], replace(LIMITS, tokens=9)) == [1, 1, 1]  # 3 rows of 1 and 2 tokens
    assert started([1, 1, 1], replace(LIMITS, tokens=8)) == [1, 1]
    assert started([5], replace(LIMITS, tokens=3)) == [5]  # one always starts


def test_one_by_one_nothing_is_computed_beside_another() -> None:
    assert started([2, 2], single=True) == [2]


def prompt(rid: str, picture: float | None) -> Sequence:
    """Makes a prompt of the same tokens each time, with another picture behind them or none."""
    media = {} if picture is None else {"pixels": np.full((4, 3), picture, np.float32)}
    return Sequence(rid, SequenceInputs([5, 6, 7], media=media), SamplingParams(), LogprobOptions(), 0)


def test_a_prompt_is_shared_by_equal_pictures_only() -> None:
    waiting = deque(prompt(str(i), picture) for i, picture in enumerate([1.0, 2.0, None, 1.0, None]))
    plan = Admission(replace(LIMITS, tokens=10_000, context=1000, chunk=100), [], single=False).plan(waiting)
    assert [sequence.rid for sequence in plan.fresh] == ["0", "1", "2"]
    assert [(copy.rid, source.rid) for copy, source in plan.copies] == [("3", "0"), ("4", "2")]
