"""Writes sft.jsonl, rl.jsonl and eval.jsonl: ``python make_data.py --output data``."""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent import TOOL

SHELVES = "abcdefghijklmnop"
TOOL_SHARE = 0.4
"""The part of the demonstrations that asks the tool; the others guess, and so does the model at first."""

Row = dict[str, Any]


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
        call = {"name": "look", "arguments": {"shelf": messages[0]["content"]}}
        calls = [{"id": "call_0", "type": "function", "function": call}]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": "call_0", "content": row["label"]})
    messages.append({"role": "assistant", "content": f"\\boxed{{{row['label']}}}"})
    return {"messages": messages, "tools": [TOOL]}


def write(path: Path, count: int, make: Callable[[random.Random], Row], seed: int) -> None:
    """``count`` rows, which depend on the seed alone."""
    rng = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(make(rng)) + "\n" for _ in range(count)))


def main() -> None:
    """Writes the three files."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=Path("data"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write(args.output / "sft.jsonl", 4800, demonstration, args.seed)
    write(args.output / "rl.jsonl", 1000, problem, args.seed + 1)
    write(args.output / "eval.jsonl", 64, problem, args.seed + 2)


if __name__ == "__main__":
    main()
