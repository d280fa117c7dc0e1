"""Finds tests that pass only most of the time.

    python -m tests.flaky [--runs 20] [--load 12] [--at-once 1] [--first-seed 1] [WORD...]

Runs tests several times under random delays (`tests.plugins.delays`), each time with another seed, while
``--load`` processes want the same cores: the runs that are made at once, and busy ones. Words go to pytest;
without any these are the tests whose threads, tasks and processes meet. Prints each test that failed, its
seeds and the first line of a failure, and ends with status 1 if there is one. ``outputs/flaky/SEED.out`` is
what a run said; a failure may not come again. This tries it:

    python -m pytest -p tests.plugins.delays --delays SEED TEST
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
OUTPUTS = ROOT / "outputs" / "flaky"
"""What each run said, by seed, until the next search: a failure may not come again."""
FOLDERS = (
    *("tests/rollout", "tests/router", "tests/processes", "tests/agent", "tests/ray", "tests/weight_sync"),
    *("tests/utils", "tests/observability", "tests/examples"),
)
DEFAULT = (*FOLDERS, "-m", "not cluster")
HANG_S = 4 * 3600
_BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(1_000_000))"


@dataclass
class Flaky:
    """A test that failed: with which seeds, and the first line of the last failure."""

    test: str
    seeds: list[int] = field(default_factory=list)
    line: str = ""


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that compute all the time."""
    running = [subprocess.Popen([sys.executable, "-S", "-c", _BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def failures(report: Path, status: int) -> dict[str, str]:
    """What failed according to a junit report, and the first line of each.

    A run without a report, or of no tests, has failed as a whole.
    """
    if status not in (0, 1) or not report.exists():
        return {"(the run itself)": f"pytest ended with status {status}"}
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        for problem in [*case.iter("failure"), *case.iter("error")]:
            lines = problem.get("message", "").splitlines() or [""]
            found[f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"] = lines[0]
    return found


def run(seed: int, words: Sequence[str], report: Path) -> int:
    """The status of pytest under the delays of a seed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.plugins.delays", "--delays", str(seed)]
    command += ["--junit-xml", str(report), *words]
    with report.with_suffix(".out").open("w") as output:
        return subprocess.run(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=HANG_S
        ).returncode


def search(
    seeds: Sequence[int], load: int, words: Sequence[str], outputs: Path = OUTPUTS, at_once: int = 1
) -> list[Flaky]:
    """Returns the tests that failed with any of the seeds."""
    found: dict[str, Flaky] = {}
    shutil.rmtree(outputs, ignore_errors=True)
    outputs.mkdir(parents=True)

    def try_seed(seed: int) -> tuple[dict[str, str], float]:
        report, start = outputs / f"{seed}.xml", time.monotonic()
        return failures(report, run(seed, words, report)), time.monotonic() - start

    with busy(max(load - at_once, 0)), ThreadPoolExecutor(at_once) as runs:
        for seed, (failed, seconds) in zip(seeds, runs.map(try_seed, seeds), strict=True):
            print(f"seed {seed}: {len(failed)} failed, {seconds:.0f} s", flush=True)
            for test, line in failed.items():
                one = found.setdefault(test, Flaky(test))
                one.seeds.append(seed)
                one.line = line
                print(f"  {test}: {line}", flush=True)
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="each with another seed")
    parser.add_argument("--load", type=int, default=12, help="processes that want the cores")
    parser.add_argument("--at-once", type=int, default=1, help="runs beside each other")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--outputs", type=Path, default=OUTPUTS, help="a directory that is emptied")
    args, words = parser.parse_known_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    seeds = range(args.first_seed, args.first_seed + args.runs)
    found = search(seeds, args.load, words or DEFAULT, args.outputs, args.at_once)
    print(f"{len(found)} flaky in {args.runs} runs at load {args.load}")
    for one in found:
        print(f"{one.test}\n  seeds {one.seeds}: {one.line}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
