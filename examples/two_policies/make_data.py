"""Write tasks: the kind of characters that is wanted, and its name.

python examples/two_policies/make_data.py --output outputs/tasks.jsonl
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

TASKS = {"a": "letter", "1": "digit"}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    parser.add_argument("--rows", type=int, default=64)
    args = parser.parse_args(argv)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": task, "label": kind} for task, kind in TASKS.items()]
    args.output.write_text("".join(json.dumps(rows[n % len(rows)]) + "\n" for n in range(args.rows)))


if __name__ == "__main__":
    main()
