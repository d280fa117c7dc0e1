"""The task without a model: ``python -m pytest test_task.py``."""

import random

from agent import TOOL, look
from make_data import demonstration, problem
from task import score


def test_the_tool_tells_what_is_on_a_shelf() -> None:
    shelves = {"k": "37"}
    assert look('{"shelf": "k"}', shelves) == "37"
    assert look('{"shelf": "z"}', shelves) == "nothing"
    assert look('{"shelf": ["k"]}', shelves) == "error: no shelf"


def test_the_reward_grows_with_what_is_right() -> None:
    answers = ["no idea", "\\boxed{8}", "\\boxed{99}", "\\boxed{39}", "\\boxed{37}"]
    scores = [score(answer, "37") for answer in answers]
    assert scores == sorted(scores) and scores[0] == scores[1] == 0 and scores[-1] == 1


def test_whoever_looks_can_be_right() -> None:
    row = problem(random.Random(0))
    asked = row["prompt"][0]["content"]
    assert look(f'{{"shelf": "{asked}"}}', row["metadata"]["shelves"]) == row["label"]


def test_demonstrations_call_the_tool_that_the_agent_has() -> None:
    rng = random.Random(0)
    rows = [demonstration(rng) for _ in range(20)]
    calls = [call for row in rows for message in row["messages"] for call in message.get("tool_calls", ())]
    assert {call["function"]["name"] for call in calls} == {TOOL["function"]["name"]}
    assert all(row["messages"][-1]["content"].startswith("\\boxed{") for row in rows)
