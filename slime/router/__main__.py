"""``python -m slime.router ARGS``: a router process, whose ``args`` stand in a JSON file that it removes."""

import json
import sys
from argparse import Namespace
from pathlib import Path

from slime.router.router import run_router


def main() -> None:
    path = Path(sys.argv[1])
    args = Namespace(**json.loads(path.read_text()))
    path.unlink()  # it holds the run's key
    run_router(args)


if __name__ == "__main__":
    main()
