"""The task without a model: ``python -m pytest test_task.py``."""

import random

from make_data import demonstration, problem
from task import score


def test_the_reward_grows_with_what_is_right() -> None:
    answers = ["no idea", "\\boxed{to}", "\\boxed{zzz}", "\\boxed{toz}", "\\boxed{top}"]
    scores = [score(answer, "top") for answer in answers]
    assert scores == sorted(scores) and scores[0] == scores[1] == 0 and scores[-1] == 1


def test_the_label_is_the_word_backwards() -> None:
    row = problem(random.Random(0))
    assert score(f"\\boxed{{{row['prompt'][0]['content'][::-1]}}}", row["label"]) == 1


def test_demonstrations_answer() -> None:
    rng = random.Random(0)
    ends = [demonstration(rng)["messages"][-1]["content"] for _ in range(20)]
    assert all(end.startswith("\\boxed{") and end.endswith("}") for end in ends)
