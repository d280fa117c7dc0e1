"""What an environment says is looked at, and becomes plain messages and numbers."""

from dataclasses import asdict

import numpy as np
import pytest

from slime.environments import Answer, Call, Step
from slime.environments.protocol import LARGEST, checked_step, messages_of, tools_of
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


@pytest.mark.parametrize("content", [7, 0, {}, b"hi", [7], [{"type": "image"}], [{"text": None}]])
def test_content_that_is_no_text_is_refused(content):
    with pytest.raises(TypeError, match="wanted: text or parts of it"):
        messages_of([{"role": "user", "content": content}])


@pytest.mark.parametrize("content", [None, "hi", ["hi", {"type": "text", "text": "you"}], ("hi",), []])
def test_content_may_be_in_parts(content):
    assert messages_of([{"role": "user", "content": content}]) == [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("said", "error"), [("\udc80", ValueError), ("é" * (LARGEST // 2), ValueError), ({1}, TypeError)]
)
def test_what_no_tokenizer_takes_is_refused_in_each_part_of_a_message(said, error):
    for message in (
        {"role": "tool", "content": "", "name": said},
        {"role": "tool", "content": [{"text": said}]},
    ):
        with pytest.raises(error):
            checked_step(Step([message]))
    with pytest.raises((TypeError, ValueError)):
        checked_step(Step(said))


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


@pytest.mark.parametrize(
    ("tools", "error", "why"),
    [
        ([{**LOOK, "more": "x" * LARGEST}], ValueError, r"tools of 1\.0 MiB \(wanted: 1 at most\)"),
        (["look"], TypeError, r"tools \['look'\] \(wanted: a list of JSON schemas\)"),
        ([{"more": {1}}], TypeError, "set is not JSON"),
    ],
)
def test_tools_are_json_and_fit_a_context(tools, error, why):
    environment = Guess()
    environment.tools = tools
    with pytest.raises(error, match=why):
        tools_of(environment)


def test_tools_are_optional():
    assert tools_of(Shelves()) == [LOOK] and tools_of(Guess()) == []
