"""Writes sft.jsonl, rl.jsonl and eval.jsonl: ``python make_data.py --output data``."""

import random

from task import HIGHEST, MAX_TURNS, Guess

from slime.cli.task_data import Row, write_files
from slime.environments import Answer

LISTENERS = 0.4
"""The part of the demonstrations that halves what is left; the others guess at random."""


def problem(rng: random.Random) -> Row:
    """A row of practice and of the evaluation: how an episode begins, and what the environment must know."""
    return {
        "prompt": [{"role": "user", "content": f"1-{HIGHEST}"}],
        "label": str(rng.randint(1, HIGHEST)),
        "metadata": {},
    }


def demonstration(rng: random.Random) -> Row:
    """A row of the imitation: an episode of somebody who listens to what he is told, or does not."""
    row, game = problem(rng), Guess()
    messages, listens, low, high = game.reset(row, seed=0), rng.random() < LISTENERS, 1, HIGHEST
    for _ in range(MAX_TURNS):
        guess = (low + high) // 2 if listens else rng.randint(1, HIGHEST)
        step = game.step(Answer(str(guess)))
        messages.append({"role": "assistant", "content": str(guess)})
        if step.done:
            break
        low, high = (guess + 1, high) if step.observation == "higher" else (low, guess - 1)
        messages.append({"role": "user", "content": str(step.observation)})
    if messages[-1]["role"] == "user":
        messages.pop()
    return {"messages": messages}


def main() -> None:
    """Writes the three files: how many rows, and what makes one."""
    write_files(
        {
            "sft": (4800, demonstration),
            "rl": (1000, problem),
            "eval": (64, problem),
        }
    )


if __name__ == "__main__":
    main()
