"""Faults planted in the processes of a run, one by one, and whether the tests find them.

    python benchmarks/planted_faults.py [--only NAME ...] [--list] [--limit 900] [--output FILE]

A fault of ``process_faults`` changes one file of a copy of the tracked files, and its tests run there:
servers, Ray actors and drivers of that run import the changed file too. First the same tests run without
any fault, as a test that fails anyway finds nothing. Prints a line per fault, and writes JSON: for each
fault what became of it, why, its tests, their CPU seconds, commit and date. The exit status
is 1 if one was not found.

``--only`` takes names or parts of them, and leaves the figures of others as they are.
"""

import argparse
import json
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.process_faults import FAULTS, Fault  # noqa: E402
from benchmarks.pytest_in_copy import commit, copy_tree, preload, run_pytest  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "process_faults.json"
FOUND, SURVIVED = "found", "survived"
DOES_NOT_APPLY = "does not apply"
"""The text that it replaces is not there once."""
NO_PROOF = "no proof"
"""A test of the same file fails without it, or they cannot be run."""

_PASSED, _FAILED = 0, 1  # of pytest; other statuses mean that no test has spoken
_MARGIN_S = 120
"""For pytest to tell of a test that ran into its limit, and to end what that test has started."""


@dataclass(frozen=True)
class Outcome:
    """What a run of tests came to.

    Attributes:
        status: pytest's, None if it had to be ended.
        failures: the lines of its summary that name a test.
        last_line: of what it printed.
        cause: the last line of a run that a test has started and shows.
    """

    status: int | None
    failures: tuple[str, ...]
    last_line: str
    cause: str
    cpu_seconds: float

    @property
    def passed(self) -> bool:
        return self.status == _PASSED and " passed" in self.last_line

    @property
    def failed(self) -> bool:
        return self.status in (_FAILED, None)

    @property
    def erred(self) -> bool:
        """Whether no test failed, and something around one did."""
        return self.status == _FAILED and all(line.startswith("ERROR") for line in self.failures)

    @property
    def words(self) -> str:
        """The first failure, if there is one."""
        return (self.failures or (self.last_line,))[0][:300] + (f" [{self.cause}]" if self.cause else "")


def planted(fault: Fault, source: str) -> str:
    """The source with the fault.

    Raises:
        ValueError: what it replaces is not there exactly once.
    """
    if (times := source.count(fault.before)) != 1:
        raise ValueError(f"{fault.path}: found {times} times {fault.before!r}, wanted once")
    return source.replace(fault.before, fault.after)


def run_with(fault: Fault, clean: Path, limit: int) -> Outcome:
    """Runs the tests of a fault in a copy of ``clean`` that has it, up to the first that fails.

    Raises:
        ValueError: the fault cannot be planted.
    """
    source = planted(fault, (clean / fault.path).read_text())
    with tempfile.TemporaryDirectory(prefix="planted-") as directory:
        # With what has been compiled of it: times of files stay, but for the one that is written.
        tree = Path(shutil.copytree(clean, Path(directory) / "tree"))
        (tree / fault.path).write_text(source)
        return run_tests([fault], tree, limit, "-x")


def run_tests(faults: Sequence[Fault], tree: Path, limit: int, *options: str) -> Outcome:
    """Runs the tests of these faults in a copy of the files; nothing of them is left when it returns."""
    files = [*dict.fromkeys(test for fault in faults for test in fault.tests)]
    choice = " or ".join({_expression(test, fault): None for fault in faults for test in fault.tests})
    with tempfile.TemporaryDirectory(prefix="tests-") as scratch:
        words = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tree), "--timeout", str(limit), *options]
        words += ["--basetemp", f"{scratch}/t", "-k", choice, *files]
        log, cpu = Path(scratch) / "log", _cpu_of_children()
        status = run_pytest(words, tree, log, len(faults) * limit + _MARGIN_S)
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        failures = [line for line in lines if re.match(r"(FAILED|ERROR) tests/", line)]
        cause = next((line for line in reversed(lines) if re.match(r"E +error: ", line)), "")
        cause = cause.removeprefix("E").strip()[:300]
        return Outcome(status, tuple(failures), (lines or [""])[-1], cause, _cpu_of_children() - cpu)


def _expression(test: str, fault: Fault) -> str:
    """For ``-k``, to which the name of a file is a word as well."""
    stem = Path(test).stem
    return f"({stem} and ({fault.choose or stem}))"


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def judge(fault: Fault, clean: Path, limit: int) -> dict[str, Any]:
    """What becomes of a fault whose tests pass without it."""
    try:
        outcome = run_with(fault, clean, limit)
        if outcome.erred:  # by the fault, or by a cluster that did not start on a busy machine
            outcome = run_with(fault, clean, limit)
    except ValueError as error:
        return {"outcome": DOES_NOT_APPLY, "why": str(error)}
    verdict = SURVIVED if outcome.passed else FOUND if outcome.failed else NO_PROOF
    why = outcome.words if outcome.status is not None else f"no end within {limit + _MARGIN_S} s"
    return {"outcome": verdict, "why": why, "cpu_seconds": round(outcome.cpu_seconds, 1)}


def measure(names: Sequence[str], clean: Path, limit: int, output: Path) -> dict[str, dict[str, Any]]:
    """Judges these faults, and writes the results after each of them.

    Args:
        clean: a copy of the files without any fault.

    Raises:
        RuntimeError: without any fault pytest cannot run these tests.
    """
    without = run_tests([FAULTS[name] for name in names], clean, limit)
    print(f"without any fault ({without.cpu_seconds:.0f} CPU s): {without.last_line}", flush=True)
    if not (without.passed or without.failures):
        raise RuntimeError(f"the tests cannot be run without any fault: {without.last_line}")
    results = json.loads(output.read_text()) if output.exists() else {"faults": {}}
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        fault = FAULTS[name]
        failing = [line for line in without.failures for test in fault.tests if test in line]
        rows[name] = row = {"tests": [*fault.tests], "choose": fault.choose}
        row |= {"outcome": NO_PROOF, "why": failing[0]} if failing else judge(fault, clean, limit)
        row |= {"commit": commit(), "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")}
        print(f"{row['outcome']:15}{name} ({row.get('cpu_seconds', 0):g} CPU s): {row['why']}", flush=True)
        write(output, {**results["faults"], **rows})
    return rows


def write(output: Path, rows: dict[str, dict[str, Any]]) -> None:
    """Writes the rows of faults that are still in the table, in its order."""
    kept = {name: rows[name] for name in FAULTS if name in rows}
    found = sum(row["outcome"] == FOUND for row in kept.values())
    figures = {"found": found, "faults_tried": len(kept), "faults": kept}
    output.write_text(json.dumps(figures, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="names of faults, or parts of names")
    parser.add_argument("--list", action="store_true", help="the faults and their tests")
    parser.add_argument("--limit", type=int, default=900, help="seconds for a single test")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    names = [name for name in FAULTS if any(part in name for part in args.only)]
    if not names:
        raise SystemExit(f"--only {' '.join(args.only)}: no such fault (wanted: see --list)")
    if args.list:
        for name in names:
            chosen = f" -k {FAULTS[name].choose!r}" if FAULTS[name].choose else ""
            print(f"{name}\n    {FAULTS[name].path}\n    {' '.join(FAULTS[name].tests)}{chosen}")
        return
    preload()
    with tempfile.TemporaryDirectory(prefix="planted-") as directory:
        clean = Path(directory) / "clean"
        copy_tree(clean)
        rows = measure(names, clean, args.limit, args.output)
    raise SystemExit(any(row["outcome"] != FOUND for row in rows.values()))


if __name__ == "__main__":
    main()
