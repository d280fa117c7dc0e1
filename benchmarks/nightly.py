"""What is too long for each change: long forms of tests, mutants, and the search for flaky tests.

    python benchmarks/nightly.py [--only tests mutation flaky] [--runs 20] [--load 12] [--at-once 1]

Writes each part's result with its date, commit and time to benchmarks/results/nightly.json. What a part that
was left out said before stays; one that was never run says so. Ends with status 1 if a part failed.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.flaky import DEFAULT, failures, search  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "nightly.json"
NOT_RUN = "not run"


@dataclass(frozen=True)
class Night:
    """How thorough the search for flaky tests is."""

    runs: int
    load: int
    at_once: int


def long_forms(night: Night) -> list[str]:
    """The tests marked ``nightly``: those that failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "nightly", "--junit-xml", str(report)]
        status = subprocess.run(command, cwd=ROOT).returncode
        return [f"{test}: {line}" for test, line in failures(report, status).items()]


def mutation(night: Night) -> list[str]:
    """`benchmarks/mutation.py`: why it failed, if it did. Its figures are in mutants.json."""
    status = subprocess.run([sys.executable, "benchmarks/mutation.py"], cwd=ROOT).returncode
    return [f"benchmarks/mutation.py ended with status {status}"] if status else []


def flaky(night: Night) -> list[str]:
    """`tests.flaky`: the tests that failed under some delays."""
    found = search(range(1, night.runs + 1), night.load, DEFAULT, at_once=night.at_once)
    return [f"{one.test} with seeds {one.seeds}: {one.line}" for one in found]


PARTS: dict[str, Callable[[Night], list[str]]] = {"tests": long_forms, "mutation": mutation, "flaky": flaky}


def commit() -> str:
    """The commit of the checkout, and whether it has other changes than results."""
    git = lambda *words: subprocess.check_output(["git", *words], cwd=ROOT, text=True).strip()
    changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return git("rev-parse", "HEAD") + (" with changes" if changed else "")


def result(part: Callable[[Night], list[str]], night: Night) -> dict[str, Any]:
    """Runs a part."""
    date, start = datetime.datetime.now(datetime.UTC), time.monotonic()
    failed = part(night)
    figures: dict[str, Any] = {"date": date.isoformat(timespec="minutes"), "commit": commit()}
    figures |= {"minutes": round((time.monotonic() - start) / 60, 1), "failed": failed}
    return figures | (
        {"runs": night.runs, "load": night.load, "at_once": night.at_once} if part is flaky else {}
    )


def run_parts(names: Sequence[str], night: Night, results: Path) -> bool:
    """Whether nothing failed in these parts; each is written when it has ended."""
    told = json.loads(results.read_text()) if results.exists() else {}
    told = {name: told.get(name, NOT_RUN) for name in PARTS}
    for name in names:
        told[name] = result(PARTS[name], night)
        results.write_text(json.dumps(told, indent=2) + "\n")
        print(f"{name}: {told[name]['failed'] or 'nothing failed'}", flush=True)
    return not any(told[name]["failed"] for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--runs", type=int, default=20, help="of the search for flaky tests")
    parser.add_argument("--load", type=int, default=12, help="processes that want the cores")
    parser.add_argument("--at-once", type=int, default=1, help="runs of that search beside each other")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(not run_parts(args.only, Night(args.runs, args.load, args.at_once), RESULTS))


if __name__ == "__main__":
    main()
