"""The task without a model: ``python -m pytest test_task.py``."""

import random

from make_data import demonstration, problem
from task import MAX_TURNS, answer_call, score


def test_the_tool_tells_what_is_on_a_shelf() -> None:
    shelves = {"k": "37"}
    assert answer_call("<tool_call>k</tool_call>", shelves) == "37"
    assert answer_call("<tool_call>z</tool_call>", shelves) == "nothing"
    assert answer_call("k, please", shelves) is None


def test_the_reward_grows_with_what_is_right() -> None:
    answers = ["no idea", "\\boxed{8}", "\\boxed{99}", "\\boxed{39}", "\\boxed{37}"]
    scores = [score(answer, "37") for answer in answers]
    assert scores == sorted(scores) and scores[0] == scores[1] == 0 and scores[-1] == 1


def test_whoever_asks_for_the_shelf_can_be_right() -> None:
    row = problem(random.Random(0))
    asked = row["prompt"][0]["content"]
    assert answer_call(f"<tool_call>{asked}</tool_call>", row["metadata"]["shelves"]) == row["label"]
    assert MAX_TURNS > 1


def test_demonstrations_end_with_the_right_answer() -> None:
    rng = random.Random(0)
    ends = [demonstration(rng)["messages"][-1]["content"] for _ in range(20)]
    assert all(end.startswith("\\boxed{") and end.endswith("}") for end in ends)
