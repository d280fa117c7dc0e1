"""Writes sft.jsonl and eval.jsonl: ``python make_data.py --output data``."""

import random

from slime.cli.task_data import Row, write_files

LETTERS = "abcdefghijklmnop"


def problem(rng: random.Random) -> Row:
    """A row of the evaluation: a prompt and its label."""
    word = "".join(rng.choices(LETTERS, k=3))
    return {"prompt": [{"role": "user", "content": word}], "label": word[::-1]}


def demonstration(rng: random.Random) -> Row:
    """A row of the imitation: a whole conversation."""
    row = problem(rng)
    return {"messages": [*row["prompt"], {"role": "assistant", "content": f"\\boxed{{{row['label']}}}"}]}


def main() -> None:
    """Writes both files: how many rows, and what makes one."""
    write_files(
        {
            "sft": (4800, demonstration),
            "eval": (64, problem),
        }
    )


if __name__ == "__main__":
    main()
