"""Random weight updates in a row: what engines hold and say after each, against references of NumPy's.

    python benchmarks/random_syncs.py [--syncs 50] [--first 0] [--output FILE]

Each draw has a model, a backend, a layout of trainer ranks, formats, a transport, bucket sizes and some
updates, and now and then an adapter, merged or beside the base (tests/weight_sync/sync_draws.py). After
each update every engine must hold the expected weights bit for bit, quantised ones those of a quantiser
that shares no code with ours, and generate what a fresh engine does, log-probs included. Writes date, commit
and draws; ends with status 1 at the first that does not hold, and names it.
"""

import argparse
import datetime
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.nightly import commit  # noqa: E402
from tests.weight_sync.random_syncs import row_of_syncs  # noqa: E402
from tests.weight_sync.sync_draws import draw  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "random_syncs.json"


def run(syncs: int, first: int) -> list[dict[str, Any]]:
    """The draws that it takes for so many updates, all of which hold."""
    drawn = []
    with tempfile.TemporaryDirectory() as directory, row_of_syncs(Path(directory)) as row:
        seed = first
        while row.version < syncs:
            one = draw(seed)
            row.take(one)
            drawn.append(asdict(one))
            seed += 1
    return drawn


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--syncs", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="seed of the first draw")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    date, start = datetime.datetime.now(datetime.UTC), time.monotonic()
    drawn = run(options.syncs, options.first)
    results = {"date": date.isoformat(timespec="minutes"), "commit": commit()}
    results |= {"minutes": round((time.monotonic() - start) / 60, 1)}
    results |= {"syncs": sum(one["syncs"] for one in drawn), "draws": drawn}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{results['syncs']} updates of {len(drawn)} draws hold")


if __name__ == "__main__":
    main()
