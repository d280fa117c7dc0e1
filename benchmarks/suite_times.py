"""How long the tiers of the test suite take.

    python benchmarks/suite_times.py [--tiers fast whole]

Runs ``scripts/test.sh`` for each tier and writes wall and CPU seconds, the number of tests, the commit, and
the seconds of each file, by which the suite orders its files and tells the time left. Prints
what the README is to say.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.nightly import commit  # noqa: E402
from tests.plugins.records import recorded  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "suite_times.json"
TIERS: dict[str, list[str]] = {"fast": ["--fast"], "whole": []}


def measure(words: list[str], records: Path) -> dict[str, Any]:
    """The figures of a tier, whose files' seconds go to ``records``.

    Raises:
        CalledProcessError: it fails.
    """
    options = f"{os.environ.get('PYTEST_ADDOPTS', '')} --record-times={records}"
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = ["bash", "scripts/test.sh", *words]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"PYTEST_ADDOPTS": options})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    figures = {"wall_s": round(time.monotonic() - start), "cpu_s_of_waited_processes": round(cpu)}
    return figures | {"tests": sum(tests for _, tests in recorded(records).values())}


def in_minutes(tier: dict[str, Any]) -> str:
    return f"{tier['tests']:,} tests in {tier['wall_s'] / 60:.0f} minutes on {tier['cores']} cores"


def write(name: str, figures: dict[str, Any], records: Path) -> None:
    """Adds a tier; the whole one says what each file takes."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"tiers": {}, "files": {}}
    results["tiers"][name] = figures
    files = recorded(records)
    results["files"] = dict(sorted((files if name == "whole" else files | results["files"]).items()))
    # A file per line, so that a change of one shows as one.
    text = re.sub(r"\[\s+([\d.]+),\s+(\d+)\s+\]", r"[\1, \2]", json.dumps(results, indent=2))
    RESULTS.write_text(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=[*TIERS])
    for name in parser.parse_args().tiers:
        with tempfile.TemporaryDirectory() as folder:
            records = Path(folder) / "times.json"
            figures = measure(TIERS[name], records)
            figures |= {"load_after": round(os.getloadavg()[0], 1), "cores": os.cpu_count()}
            write(name, figures | {"commit": commit()}, records)
            print(f"{name}: {in_minutes(figures)}")


if __name__ == "__main__":
    main()
