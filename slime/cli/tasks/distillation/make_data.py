"""Writes sft.jsonl, teacher.jsonl, rl.jsonl and eval.jsonl: ``python make_data.py --output data``."""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

LETTERS = "abcdefghijklmnop"
RIGHT_SHARE = 0.3
"""The part of the student's demonstrations that is right; all of the teacher's are."""

Row = dict[str, Any]


def problem(rng: random.Random) -> Row:
    """A row of practice and of the evaluation: a prompt and its label."""
    word = "".join(rng.choices(LETTERS, k=3))
    return {"prompt": [{"role": "user", "content": word}], "label": word[::-1]}


def demonstration(rng: random.Random) -> Row:
    """A row of the student's imitation: a whole conversation."""
    row = problem(rng)
    return _with_answer(row, row["label"] if rng.random() < RIGHT_SHARE else row["prompt"][0]["content"])


def of_teacher(rng: random.Random) -> Row:
    """A row of the teacher's imitation."""
    row = problem(rng)
    return _with_answer(row, row["label"])


def _with_answer(row: Row, word: str) -> Row:
    return {"messages": [*row["prompt"], {"role": "assistant", "content": f"\\boxed{{{word}}}"}]}


def write(path: Path, count: int, make: Callable[[random.Random], Row], seed: int) -> None:
    """``count`` rows, which depend on the seed alone."""
    rng = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(make(rng)) + "\n" for _ in range(count)))


def main() -> None:
    """Writes the four files."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=Path("data"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write(args.output / "sft.jsonl", 4800, demonstration, args.seed)
    write(args.output / "teacher.jsonl", 4800, of_teacher, args.seed + 3)
    write(args.output / "rl.jsonl", 1000, problem, args.seed + 1)
    write(args.output / "eval.jsonl", 64, problem, args.seed + 2)


if __name__ == "__main__":
    main()
