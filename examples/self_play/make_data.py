"""Write games: who begins.

python examples/self_play/make_data.py --output outputs/games.jsonl
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

SIDES = ("begins", "answers")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    parser.add_argument("--rows", type=int, default=64)
    args = parser.parse_args(argv)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": "|", "label": side} for side in SIDES]
    args.output.write_text("".join(json.dumps(rows[n % len(rows)]) + "\n" for n in range(args.rows)))


if __name__ == "__main__":
    main()
