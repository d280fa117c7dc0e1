"""Writes sft.jsonl and eval.jsonl: ``python make_data.py --output data``."""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

LETTERS = "abcdefghijklmnop"

Row = dict[str, Any]


def problem(rng: random.Random) -> Row:
    """A row of the evaluation: a prompt and its label."""
    word = "".join(rng.choices(LETTERS, k=3))
    return {"prompt": [{"role": "user", "content": word}], "label": word[::-1]}


def demonstration(rng: random.Random) -> Row:
    """A row of the imitation: a whole conversation."""
    row = problem(rng)
    return {"messages": [*row["prompt"], {"role": "assistant", "content": f"\\boxed{{{row['label']}}}"}]}


def write(path: Path, count: int, make: Callable[[random.Random], Row], seed: int) -> None:
    """``count`` rows, which depend on the seed alone."""
    rng = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(make(rng)) + "\n" for _ in range(count)))


def main() -> None:
    """Writes both files."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=Path("data"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write(args.output / "sft.jsonl", 4800, demonstration, args.seed)
    write(args.output / "eval.jsonl", 64, problem, args.seed + 2)


if __name__ == "__main__":
    main()
