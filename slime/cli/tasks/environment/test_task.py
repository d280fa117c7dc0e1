"""The task without a model: ``python -m pytest test_task.py``."""

import random

from make_data import demonstration, problem
from task import HIGHEST, MAX_TURNS, Guess

from slime.environments import Answer


def play(number: int, *guesses: str) -> float:
    """The sum of the rewards of these guesses."""
    game, total = Guess(), 0.0
    game.reset({"prompt": [], "label": str(number)}, seed=0)
    for guess in guesses:
        step = game.step(Answer(guess))
        total += step.reward
        if step.done:
            break
    return total


def test_only_the_number_earns_something() -> None:
    assert play(5, "5") == play(5, "4", " 6\n", "5") == 1.0
    assert play(5, "4", "6", "7") == play(5, "so", "5") == play(5, "0", "5") == 0.0


def test_whoever_halves_what_is_left_wins_always() -> None:
    for number in range(1, HIGHEST + 1):
        game, low, high, rewards = Guess(), 1, HIGHEST, list[float]()
        game.reset({"prompt": [], "label": str(number)}, seed=0)
        for _ in range(MAX_TURNS):
            guess = (low + high) // 2
            step = game.step(Answer(str(guess)))
            rewards.append(step.reward)
            low, high = (guess + 1, high) if step.observation == "higher" else (low, guess - 1)
        assert max(rewards) == 1.0


def test_demonstrations_show_whole_episodes() -> None:
    rng = random.Random(0)
    for _ in range(50):
        messages = demonstration(rng)["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert 2 <= len(messages) <= 2 * MAX_TURNS
    assert {int(problem(rng)["label"]) for _ in range(99)} == set(range(1, HIGHEST + 1))
