"""Answers that attack their grader, through every grader in a process: what was run, and what it cost.

    python benchmarks/hostile_answers.py [--seeds 1 2 3] [--graders dapo f1] [--output FILE]

A seed is a thousand answers of ``tests/rollout/graders/hostile.py``, and each grader sees all of them. Writes
JSON: per seed and grader the answers of which anything was evaluated, opened or started; those without a
verdict within the limit, which ended with their process; and the longest call, the start of a new process and
the wait for a core included. Ends with status 1 if anything was run. Keeps the results of other
seeds and graders.
"""

import argparse
import json
import sys
import time
from itertools import islice
from pathlib import Path

from slime.rollout.base_types import GradingFailed
from slime.rollout.rm_hub.grading_pool import GradingProcess

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.rollout.graders import hostile, watched

RESULTS = Path(__file__).parent / "results" / "hostile_answers.json"
LABELS = ("2/3", "x^2-1", "\\frac{1}{2}")
ANSWERS = 1000
LIMIT_S = 10


def look_through(process: GradingProcess, grader: str, seed: int) -> dict[str, object]:
    """Has a grader look through a thousand answers."""
    longest, ran, unended = 0.0, [], []
    for number, answer in enumerate(islice(hostile.answers(seed), ANSWERS)):
        start = time.monotonic()
        try:
            _equal, found = process.call(watched.HERE, grader, LABELS[number % len(LABELS)], answer)
            ran += [answer] if found else []
        except GradingFailed:
            unended.append(answer[:60])
        longest = max(longest, time.monotonic() - start)
    return {"answers": ANSWERS, "ran": ran, "no_verdict": unended, "longest_s": round(longest, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 11)))
    parser.add_argument("--graders", nargs="+", choices=watched.GRADERS, default=watched.GRADERS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    found = json.loads(args.output.read_text()) if args.output.exists() else {"limit_s": LIMIT_S, "seeds": {}}
    process = GradingProcess(LIMIT_S)
    try:
        for seed in args.seeds:
            new = {grader: look_through(process, grader, seed) for grader in args.graders}
            found["seeds"][str(seed)] = found["seeds"].get(str(seed), {}) | new
            args.output.write_text(json.dumps(found, indent=2, ensure_ascii=True) + "\n")
            print(f"seed {seed}: {new}"[:300], flush=True)
    finally:
        process.stop()
    if any(row["ran"] for seed in found["seeds"].values() for row in seed.values()):
        sys.exit("error: something was run")


if __name__ == "__main__":
    main()
