"""Faults put into weight sync, models, rollout and backends, drawn at random, and whether the tests see them.

    python benchmarks/sampled_mutants.py [--count 10] [--seed 1] [--only backends] [--list]

A mutant of ``mutation.py`` changes one file of a copy of the tracked files, and the tests of that module run
there: ranks, engines and whatever else they start import the changed file too. A module's tests are those of
``sampled_modules.py``, else the file under ``tests/`` of its name and the cheapest that import from it. They
run without any mutant first, as a test that fails anyway sees nothing.

Prints a line per mutant and writes JSON after each: by seed, commit, date and what became of each mutant.
``EQUIVALENT`` of ``sampled_modules.py`` says of which it has been argued that nothing can tell them apart.
"""

import argparse
import ast
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.mutation import Mutant, mutants  # noqa: E402
from benchmarks.pytest_in_copy import commit, copy_tree, preload, run_pytest  # noqa: E402
from benchmarks.sampled_modules import EQUIVALENT, SAMPLED  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "sampled_mutants.json"
TIMES = RESULTS.with_name("suite_times.json")
PACKAGES = ("weight_sync", "models", "rollout", "backends")
KILLED, SURVIVES, NOT_JUDGED = "killed", "survives", "not judged"
_MAX_FILES, _MAX_SECONDS = 2, 10.0  # of tests beside the file of a module's name
_LEAST_S = 300.0
_SLOWER = 10.0
"""So many times what the tests need without a fault; a busy machine is no mutant's fault."""


def test_files(path: str) -> tuple[str, ...]:
    """Returns the tests that have to see what is wrong with a module; none if nobody says which."""
    if path in SAMPLED:
        return tuple(f"tests/{name}.py" for name in SAMPLED[path])
    parts = Path(path).parts
    mirror = str(Path("tests", *parts[1:-1], f"test_{parts[-1]}"))
    module = path.removesuffix(".py").replace("/", ".")
    others = [name for name, imported in _imports().items() if module in imported and name != mirror]
    times = {name: _seconds().get(name, 0.0) for name in others}
    cheap = sorted((name for name in others if times[name] <= _MAX_SECONDS), key=lambda name: times[name])
    return (*([mirror] if (ROOT / mirror).is_file() else []), *cheap[:_MAX_FILES])


@cache
def _seconds() -> dict[str, float]:
    """Returns what each file of tests takes on an idle machine, as was measured."""
    files = json.loads(TIMES.read_text())["files"]
    return {name: seconds for name, (seconds, _) in files.items()}


@cache
def _imports() -> dict[str, set[str]]:
    """Returns, by file of tests, the modules that it imports from, whole runs left out."""
    found = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        name = str(file.relative_to(ROOT))
        if not name.startswith(("tests/e2e/", "tests/gpu/", "tests/sglang_cpu/")):
            nodes = ast.walk(ast.parse(file.read_text()))
            found[name] = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return found


def modules(package: str) -> Iterator[str]:
    """Yields the modules of a package that have tests."""
    for file in sorted((ROOT / "slime" / package).rglob("*.py")):
        path = str(file.relative_to(ROOT))
        if test_files(path):
            yield path


def drawn(package: str, count: int, seed: int) -> list[Mutant]:
    """Draws so many mutants of a package, module by module."""
    found = [mutant for path in modules(package) for mutant in mutants(path, (ROOT / path).read_text())]
    sample = random.Random(f"{package} {seed}").sample(found, min(count, len(found)))
    return sorted(sample, key=lambda mutant: (mutant.path, mutant.line))


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run of tests: whether all passed, why not, and the seconds."""

    passed: bool
    why: str
    seconds: float


class Copy:
    """A copy of the checkout in which the tests of a mutant run."""

    def __init__(self, tree: Path) -> None:
        self._tree, self._changes = tree, 0
        self._clean: dict[tuple[str, ...], Outcome] = {}
        copy_tree(tree)

    def judge(self, mutant: Mutant) -> tuple[str, str]:
        """Tells what becomes of a mutant, and why."""
        files = test_files(mutant.path)
        if files not in self._clean:
            self._clean[files] = self._run(files, 6 * _LEAST_S)
        clean = self._clean[files]
        if not clean.passed:
            return NOT_JUDGED, f"without any fault: {clean.why}"
        file = self._tree / mutant.path
        source, times = file.read_text(), file.stat()
        file.write_text(mutant.source)
        self._changes += 1  # what is compiled of it is told from others by size and second
        os.utime(file, (times.st_mtime, int(times.st_mtime) + self._changes))
        try:
            found = self._run(files, max(_LEAST_S, _SLOWER * clean.seconds))
        finally:
            file.write_text(source)
            os.utime(file, (times.st_atime, times.st_mtime))
        return (SURVIVES if found.passed else KILLED), found.why

    def _run(self, files: tuple[str, ...], limit: float) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="mutant-") as scratch:
            log, start = Path(scratch) / "log", time.monotonic()
            words = ["-qx", "-p", "no:cacheprovider", "--rootdir", str(self._tree)]
            status = run_pytest([*words, "--basetemp", f"{scratch}/t", *files], self._tree, log, limit)
            lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
            failures = [line for line in lines if line.startswith(("FAILED tests/", "ERROR tests/"))]
            why = f"no end within {limit:.0f} s" if status is None else (failures or lines or ["?"])[-1][:200]
            return Outcome(status == 0, why, time.monotonic() - start)


def label(mutant: Mutant) -> str:
    """Names a mutant; lines move, so that they do not count."""
    return f"{mutant.path}: {mutant.change}"


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Counts, by package, those that were judged, killed, and are equivalent to the source."""
    found = {}
    for package in PACKAGES:
        of_it = {name: row for name, row in rows.items() if name.startswith(f"slime/{package}/")}
        judged = {name: row for name, row in of_it.items() if row["outcome"] != NOT_JUDGED}
        found[package] = {
            "judged": len(judged),
            "killed": sum(row["outcome"] == KILLED for row in judged.values()),
            "equivalent": sum(
                row["outcome"] == SURVIVES and name in EQUIVALENT for name, row in judged.items()
            ),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=10, help="mutants to draw of each package")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn")
    parser.add_argument("--only", choices=PACKAGES, nargs="+", default=[*PACKAGES])
    parser.add_argument("--list", action="store_true", help="what would be drawn")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    # Of all packages in turn, so that a run that is cut short says something of each.
    samples = [drawn(package, args.count, args.seed) for package in args.only]
    if args.list:
        for sample in samples:
            print(
                *(f"{mutant.line:4} {label(mutant)}  {test_files(mutant.path)}" for mutant in sample),
                sep="\n",
            )
        return
    preload()
    results = json.loads(args.output.read_text()) if args.output.exists() else {"seeds": {}}
    rows = results["seeds"].setdefault(str(args.seed), {"mutants": {}})["mutants"]
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        copy = Copy(Path(directory) / "tree")
        for number in range(args.count):
            for mutant in (sample[number] for sample in samples if number < len(sample)):
                outcome, why = copy.judge(mutant)
                now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
                told = {"outcome": outcome, "why": why, "line": mutant.line, "commit": commit(), "date": now}
                rows[label(mutant)] = told
                print(f"{outcome:11}{label(mutant)}: {why}", flush=True)
                results["seeds"][str(args.seed)]["packages"] = summary(rows)
                args.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
