"""What a disturbed run must have in common with its twin."""

import pytest

from slime.chaos.twins import VARYING, differences, missing_steps


def test_equal_rows_differ_in_nothing_whatever_the_clock_says():
    row = {"train/loss": 0.5, "axis": "train"}
    other = {**row, **{f"a/{word}b": 1 for word in VARYING}}
    assert list(differences({"train": {0: row}}, {"train": {0: other}})) == []


@pytest.mark.parametrize("axis", ["rollout", "train", "eval"])
def test_every_difference_is_named(axis):
    found = {axis: {0: {"a": 1, "b": 2}, 1: {"a": 1}}}
    wanted = {axis: {0: {"a": 1, "b": 3}, 2: {"c": 4}}}
    assert list(differences(found, wanted)) == [
        f"{axis} 0: b is 2, the twin's 3",
        f"{axis} 1: a is 1, the twin's None",
        f"{axis} 2: c is None, the twin's 4",
    ]


def test_steps_without_metrics():
    rows = {0: {}, 1: {}, 3: {}}
    assert missing_steps(rows, None) == [2]
    assert missing_steps(rows, {0: {}, 4: {}}) == [4]
    assert missing_steps({}, None) == []
