"""The data files of the tasks that ``slime new-task`` writes."""

import argparse
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Make = Callable[[random.Random], Row]


def write_files(files: Mapping[str, tuple[int, Make]]) -> None:
    """Writes ``NAME.jsonl`` for each name, as the command line says: ``--output data --seed 0``.

    Args:
        files: the number of rows, and what makes one. Each file is drawn from a seed of its own.
    """
    parser = argparse.ArgumentParser(
        description=f"Writes {', '.join(f'{name}.jsonl' for name in files)}.", allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, default=Path("data"), help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    for number, (name, (count, make)) in enumerate(files.items()):
        rng = random.Random(args.seed + number)
        rows = (json.dumps(make(rng)) for _ in range(count))
        (args.output / f"{name}.jsonl").write_text("".join(f"{row}\n" for row in rows))
