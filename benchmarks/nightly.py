"""What is too long for each change: long forms of tests, mutants, flaky tests, the audit, and fuzzed servers.

    python benchmarks/nightly.py [--only tests mutation fuzz] [--runs 20] [--load 12] [--at-once 1]
    python benchmarks/nightly.py --files tests/examples/test_notebooks.py

Writes each part's result with its date, commit and time to benchmarks/results/nightly.json. What a part that
was left out said before stays; one that was never run says so. With ``--files`` the long forms of these alone
are run, and each has a result of its own below "files". Ends with status 1 if a part failed.
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
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.flaky import DEFAULT, failures, search  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "nightly.json"
NOT_RUN = "not run"
AUDIT_SAYS = {
    1: ": a licence or a weakness",
    3: ": nothing known to be wrong, but weaknesses could not be asked for",
}


@dataclass(frozen=True)
class Night:
    """How thorough the search for flaky tests is."""

    runs: int
    load: int
    at_once: int


def long_forms(night: Night, files: Sequence[str] = ()) -> list[str]:
    """The tests marked ``nightly``: those that failed.

    Args:
        files: where they are; all by default.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "nightly", "--junit-xml", str(report), *files]
        status = subprocess.run(command, cwd=ROOT).returncode
        return [f"{test}: {line}" for test, line in failures(report, status).items()]


def mutation(night: Night) -> list[str]:
    """`benchmarks/mutation.py`: why it failed, if it did. Its figures are in mutants.json."""
    status = subprocess.run([sys.executable, "benchmarks/mutation.py"], cwd=ROOT).returncode
    return [f"benchmarks/mutation.py ended with status {status}"] if status else []


def audit(night: Night) -> list[str]:
    """`scripts/audit.sh`: why it failed, if it did."""
    status = subprocess.run(["bash", "scripts/audit.sh"], cwd=ROOT).returncode
    told = f"scripts/audit.sh ended with status {status}"
    return [f"{told}{AUDIT_SAYS.get(status, '')}"] if status else []


def fuzz(night: Night) -> list[str]:
    """`benchmarks/fuzz_servers.py`: why it failed, if it did. What it found is in server_fuzz.json."""
    status = subprocess.run([sys.executable, "benchmarks/fuzz_servers.py"], cwd=ROOT).returncode
    return [f"benchmarks/fuzz_servers.py ended with status {status}"] if status else []


def flaky(night: Night) -> list[str]:
    """`tests.flaky`: the tests that failed under some delays."""
    found = search(range(1, night.runs + 1), night.load, DEFAULT, at_once=night.at_once)
    return [f"{one.test} with seeds {one.seeds}: {one.line}" for one in found]


PARTS: dict[str, Callable[[Night], list[str]]] = {
    "tests": long_forms,
    "mutation": mutation,
    "flaky": flaky,
    "audit": audit,
    "fuzz": fuzz,
}


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
    told = _told(results)
    for name in names:
        told[name] = result(PARTS[name], night)
        _write(told, name, told[name], results)
    return not any(told[name]["failed"] for name in names)


def run_files(files: Sequence[str], night: Night, results: Path) -> bool:
    """Whether no long form of these test files failed."""
    told = _told(results)
    for file in files:
        told["files"][file] = result(partial(long_forms, files=(file,)), night)
        _write(told, file, told["files"][file], results)
    return not any(told["files"][file]["failed"] for file in files)


def _told(results: Path) -> dict[str, Any]:
    """What was written so far."""
    told = json.loads(results.read_text()) if results.exists() else {}
    return {name: told.get(name, NOT_RUN) for name in PARTS} | {"files": told.get("files", {})}


def _write(told: dict[str, Any], name: str, figures: dict[str, Any], results: Path) -> None:
    results.write_text(json.dumps(told, indent=2) + "\n")
    print(f"{name}: {figures['failed'] or 'nothing failed'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--files", nargs="+", help="test files whose long forms alone are run")
    parser.add_argument("--runs", type=int, default=20, help="of the search for flaky tests")
    parser.add_argument("--load", type=int, default=12, help="processes that want the cores")
    parser.add_argument("--at-once", type=int, default=1, help="runs of that search beside each other")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    night = Night(args.runs, args.load, args.at_once)
    passed = run_files(args.files, night, RESULTS) if args.files else run_parts(args.only, night, RESULTS)
    sys.exit(not passed)


if __name__ == "__main__":
    main()
