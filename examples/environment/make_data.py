"""Write rows for an environment that needs none: each is an episode.

python examples/environment/make_data.py --output outputs/lake.jsonl
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    parser.add_argument("--rows", type=int, default=64)
    args = parser.parse_args(argv)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    rows = ({"prompt": f"episode {number}", "metadata": {}} for number in range(args.rows))
    args.output.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
