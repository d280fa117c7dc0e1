"""What the process of an environment of ``verifiers`` tells of an episode, without the library."""

import json

import numpy as np
import pytest

from slime.environments.verifiers_host import ending_of


def test_an_episode_is_worth_what_its_rubric_says():
    told = ending_of({"reward": np.float32(0.5), "metrics": {"right": 1}, "stop_condition": "max_turns"})
    assert json.loads(json.dumps(told)) == {
        **{"reward": 0.5, "metrics": {"right": 1.0}, "is_truncated": False},
        **{"stop_condition": "max_turns", "error": None},
    }


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ({"reward": float("nan")}, "its reward is nan (wanted: a finite number)"),
        ({"reward": float("-inf")}, "its reward is -inf (wanted: a finite number)"),
        ({"reward": None}, "its reward is None (wanted: a finite number)"),
        ({"reward": float("nan"), "error": ValueError("no")}, "no"),
    ],
)
def test_one_whose_reward_is_no_number_is_of_unknown_worth(output, said):
    told = ending_of(output)
    assert (told["reward"], told["error"]) == (None, said)
