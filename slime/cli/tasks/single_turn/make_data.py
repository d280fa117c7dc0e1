"""Writes sft.jsonl, rl.jsonl and eval.jsonl: ``python make_data.py --output data``."""

import random

from slime.cli.task_data import Row, write_files

LETTERS = "abcdefghijklmnop"
RIGHT_SHARE = 0.3
"""The part of the demonstrations that is right; the others repeat the word, as the model then does."""


def problem(rng: random.Random) -> Row:
    """A row of practice and of the evaluation: a prompt and its label."""
    word = "".join(rng.choices(LETTERS, k=3))
    return {"prompt": [{"role": "user", "content": word}], "label": word[::-1]}


def demonstration(rng: random.Random) -> Row:
    """A row of the imitation: a whole conversation."""
    row = problem(rng)
    word = row["label"] if rng.random() < RIGHT_SHARE else row["prompt"][0]["content"]
    return {"messages": [*row["prompt"], {"role": "assistant", "content": f"\\boxed{{{word}}}"}]}


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
