"""Whole runs with SGLang's own servers on the CPU: how far trainer and engine are apart in each kind of run.

    python benchmarks/sglang_runs.py [--only "PPO or streaming"]

Runs `bash scripts/test-sglang.sh --runs` and writes, for each kind, the largest mean difference of log-probs
of a step (of steps that are on policy), seconds, date and commit to benchmarks/results/sglang_runs.json; of
what SGLang does not serve on a CPU the error with which it says so. What was left out keeps its row.
Ends with status 1 if a run failed.
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.nightly import commit  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "sglang_runs.json"


def run(only: str | None, report: Path) -> int:
    """The exit status of the tests."""
    chosen = ["-k", only] if only else []
    command = ["bash", "scripts/test-sglang.sh", "--runs", "-o", "junit_family=xunit1", *chosen]
    return subprocess.run([*command, "--junit-xml", str(report)], cwd=ROOT).returncode


def rows(report: Path) -> dict[str, dict[str, Any]]:
    """Kind to figures, of the tests that passed and say which kind they are."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        told = {entry.get("name"): entry.get("value") for entry in case.iter("property")}
        kind = told.pop("kind", None)
        if kind is None or case.find("failure") is not None or case.find("error") is not None:
            continue
        figures = {name: value if name == "not_served" else float(value or 0) for name, value in told.items()}
        found[kind] = {**figures, "seconds": round(float(case.get("time") or 0))}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", help="which tests, in the words of pytest -k")
    only = parser.parse_args().only
    made = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"), "commit": commit()}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        status = run(only, report)
        told: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        told |= {kind: figures | made for kind, figures in rows(report).items()}
    RESULTS.write_text(json.dumps(dict(sorted(told.items())), indent=2) + "\n")
    return int(status != 0)


if __name__ == "__main__":
    raise SystemExit(main())
