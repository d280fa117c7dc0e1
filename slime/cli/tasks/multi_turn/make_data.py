"""Writes sft.jsonl, rl.jsonl and eval.jsonl: ``python make_data.py --output data``."""

import random

from slime.cli.task_data import Row, write_files

SHELVES = "abcdefghijklmnop"
TOOL_SHARE = 0.4
"""The part of the demonstrations that asks the tool; the others guess, and so does the model at first."""


def problem(rng: random.Random) -> Row:
    """A row of practice and of the evaluation: a prompt, its label, and what the environment needs."""
    shelves = {shelf: f"{rng.randrange(100):02}" for shelf in rng.sample(SHELVES, 2)}
    asked = next(iter(shelves))
    return {
        "prompt": [{"role": "user", "content": asked}],
        "label": shelves[asked],
        "metadata": {"shelves": shelves},
    }


def demonstration(rng: random.Random) -> Row:
    """A row of the imitation: a whole conversation."""
    row = problem(rng)
    messages = list(row["prompt"])
    if rng.random() < TOOL_SHARE:
        messages.append({"role": "assistant", "content": f"<tool_call>{messages[0]['content']}</tool_call>"})
        messages.append({"role": "tool", "content": row["label"]})
    messages.append({"role": "assistant", "content": f"\\boxed{{{row['label']}}}"})
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
