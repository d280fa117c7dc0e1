"""What an environment says is looked at, and becomes plain messages and numbers."""

from dataclasses import asdict

import numpy as np
import pytest

from slime.environments import Answer, Call, Step
from slime.environments.protocol import checked_step, messages_of, tools_of
from tests.environments.games import LOOK, Guess, Shelves


def test_a_text_is_one_message_and_messages_stay():
    assert messages_of("hi") == [{"role": "user", "content": "hi"}]
    tool = messages_of("37", role="tool", tool_call_id="call_0")
    assert tool == [{"role": "tool", "tool_call_id": "call_0", "content": "37"}]
    said = ({"role": "tool", "content": "1"}, {"role": "user", "content": "2"})
    assert messages_of(said, role="tool") == list(said)


@pytest.mark.parametrize("observation", [None, 7, [], ["hi"], [{"content": "hi"}], {"role": "user"}])
def test_an_observation_that_is_neither_is_refused(observation):
    with pytest.raises(TypeError, match="wanted: a text, or messages with a role each"):
        messages_of(observation)


def test_numbers_of_numpy_become_plain_ones():
    step = checked_step(Step("hi", np.float32(0.5), np.bool_(True)))
    assert step == Step("hi", 0.5, True)
    assert (type(step.reward), type(step.done)) == (float, bool)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -np.inf])
def test_a_reward_is_finite(reward):
    with pytest.raises(ValueError, match="wanted: a finite number"):
        checked_step(Step("hi", reward))


def test_a_step_is_a_step():
    with pytest.raises(TypeError, match=r"step returned \('hi', 1.0\)"):
        checked_step(("hi", 1.0))


def test_an_answer_survives_json():
    answer = Answer("hm", [Call("look", {"shelf": "a"}, "call_1")], "thinking")
    assert Answer.from_dict(asdict(answer)) == answer


def test_tools_are_optional():
    assert tools_of(Shelves()) == [LOOK] and tools_of(Guess()) == []
