"""The task: a number is to be guessed in three turns, and each wrong guess is told to be too low or too high.

    user       1-7
    assistant  4
    user       higher
    assistant  6
    user       lower
    assistant  5

``run.yaml`` names ``task.generate``: it lets the model play the environment, and gives its rewards.
"""

from collections.abc import Mapping
from typing import Any

from slime.environments import Answer, Step
from slime.rollout.episodes import Episodes

MAX_TURNS = 3
HIGHEST = 7


class Guess:
    """Whoever halves what is left wins always; whoever guesses at random, every third time."""

    def reset(self, task: Mapping[str, Any], seed: int) -> list[dict[str, str]]:
        """Begins an episode by a row of the data: its prompt is what the model hears first."""
        self.number = int(task["label"])
        return list(task["prompt"])

    def step(self, answer: Answer) -> Step:
        """What comes of a guess. The text of a model is read, never evaluated."""
        guess = answer.text.strip()
        if guess not in map(str, range(1, HIGHEST + 1)):
            return Step(done=True)
        if int(guess) == self.number:
            return Step(reward=1.0, done=True)
        return Step("higher" if int(guess) < self.number else "lower")


# In a process of its own, which is ended if it hangs: processes=8
generate = Episodes(Guess, max_turns=MAX_TURNS)
