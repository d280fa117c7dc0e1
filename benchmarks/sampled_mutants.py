"""Faults put into weight sync, models, rollout and backends, drawn at random, and whether the tests see them.

    python benchmarks/sampled_mutants.py [--count 10] [--seed 1] [--only backends] [--list | --again]

A mutant of ``mutation.py`` changes one file of a copy of the tracked files, and tests run there: ranks,
engines and whatever else they start import the changed file too. First run those of ``sampled_modules.py``,
else the file under ``tests/`` of the module's name and the cheapest that import from it. If they see nothing,
others run that reach the module, nearest first, for a minute: the suite would run all of them. A test that
fails counts if it passes without the mutant.

Not drawn are numbers of seconds, retries, cache entries and megabytes at once, of which one more is no fault,
lines of a log that tell no trouble, imports for types alone, and ``frozen=True``: mypy, which every commit
passes, refuses an assignment to such a field, so that nothing runs into it. Prints a line per mutant and
writes JSON after each: by seed, commit, date and what became of it, as it was drawn and since tests were
added. ``--again`` judges those of the seed that live, by their labels: what is drawn changes with the code.
``EQUIVALENT`` of ``sampled_modules.py`` says of which it has been argued that nothing can tell them apart.
"""

import argparse
import json
import os
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.mutation import Mutant, changes, mutants  # noqa: E402
from benchmarks.pytest_in_copy import commit, copy_tree, preload, run_pytest  # noqa: E402
from benchmarks.reaching_tests import importing, reaching, seconds  # noqa: E402
from benchmarks.sampled_modules import EQUIVALENT, SAMPLED, SAMPLED_FOLDERS  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "sampled_mutants.json"
PACKAGES = ("weight_sync", "models", "rollout", "backends")
KILLED, SURVIVES, NOT_JUDGED = "killed", "survives", "not judged"
_MAX_FILES, _MAX_SECONDS = 2, 10.0  # of tests beside the file of a module's name
_FURTHER_SECONDS = 60.0
_TEST_LIMIT_S = 120
_LEAST_S = 300.0
_SLOWER = 10.0
"""So many times what the tests need on an idle machine; a busy one is no mutant's fault."""
_TESTS = "not cluster and not e2e and not gpu and not nightly"
_FAILED = re.compile(r"(?:FAILED|ERROR) (tests/[\w/]+\.py(?:::\w+)?)")
_NUMBER = re.compile(r"[\d.e-]+")
_NO_FAULT = (
    r"_S|_s|SECONDS|RETRIES|retries|REMEMBERED|_KEPT|[Tt]imeout(_\w+)?|_(STRIP|MAPPED|BLOCK|BUCKET)_BYTES"
)
_NO_TROUBLE = re.compile(r"logger\.(info|debug)\(.*=>  None")


@cache
def test_files(path: str) -> tuple[str, ...]:
    """Returns the tests that have to see what is wrong with a module; none if nobody says which."""
    of_folders = [names for folder, names in SAMPLED_FOLDERS.items() if path.startswith(folder)]
    more = [f"tests/{name}.py" for names in of_folders for name in names]
    if path in SAMPLED:
        return (*(f"tests/{name}.py" for name in SAMPLED[path]), *more)
    parts = Path(path).parts
    mirror = str(Path("tests", *parts[1:-1], f"test_{parts[-1]}"))
    others = [name for name in importing(path) if name != mirror and seconds(name) <= _MAX_SECONDS]
    cheap = sorted(others, key=lambda name: (seconds(name), name))
    found = [*([mirror] if (ROOT / mirror).is_file() else []), *cheap[:_MAX_FILES], *more]
    return tuple(dict.fromkeys(found))


@cache
def further_files(path: str) -> tuple[str, ...]:
    """Returns other tests that reach a module, the nearest ones, for about a minute."""
    chosen, left = [], _FURTHER_SECONDS
    for name in reaching(path):
        if name not in test_files(path) and seconds(name) <= left:
            chosen.append(name)
            left -= seconds(name)
    return tuple(chosen)


def modules(package: str) -> Iterator[str]:
    """Yields the modules of a package that have tests."""
    for file in sorted((ROOT / "slime" / package).rglob("*.py")):
        path = str(file.relative_to(ROOT))
        if test_files(path) or further_files(path):
            yield path


def drawn(package: str, count: int, seed: int) -> dict[str, Mutant]:
    """Draws so many mutants of a package, module by module, by their labels."""
    found = [entry for path in modules(package) for entry in _labelled(path)]
    return _made(random.Random(f"{package} {seed}").sample(found, min(count, len(found))))


def alive(rows: dict[str, dict[str, Any]]) -> dict[str, Mutant]:
    """The mutants of rows that no test has killed, by their labels, where the code still has them."""
    labels = {label for label, row in rows.items() if row["outcome"] == SURVIVES}
    paths = sorted({label.partition(": ")[0] for label in labels})
    entries = [entry for path in paths if (ROOT / path).is_file() for entry in _labelled(path)]
    return _made([entry for entry in entries if entry[0] in labels])


def _made(entries: list[tuple[str, str, int]]) -> dict[str, Mutant]:
    made = {label: next(mutants(path, (ROOT / path).read_text(), {at})) for label, path, at in entries}
    return dict(sorted(made.items(), key=lambda pair: (pair[1].path, pair[1].line)))


def _labelled(path: str) -> Iterator[tuple[str, str, int]]:
    """Yields label, path and number of what may be drawn; equal changes are counted in labels."""
    source = (ROOT / path).read_text()
    lines, seen = source.splitlines(), Counter[str]()
    for at, (line, change) in enumerate(changes(source)):
        seen[change] += 1
        if not _tells_nothing(change, lines[line - 1]):
            yield f"{path}: {change}" + (f" ({seen[change]})" if seen[change] > 1 else ""), path, at


def _tells_nothing(change: str, line: str) -> bool:
    """Whether it is no fault: one more of some number, a log where all is well, types, what mypy sees."""
    before = change.partition("  =>  ")[0]
    if before == "TYPE_CHECKING" or (before == "True" and line == "@dataclass(frozen=True)"):
        return True
    if _NUMBER.fullmatch(before):
        named = rf"({_NO_FAULT})\b(: \w+)? ?= ?{re.escape(before)}(?![\d.])"
        return re.search(named, line) is not None
    return _NO_TROUBLE.match(change) is not None


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run of tests: whether all passed, else the test that did not, and why."""

    passed: bool
    test: str
    why: str


class Copy:
    """A copy of the checkout in which the tests of a mutant run."""

    def __init__(self, tree: Path) -> None:
        self._tree, self._changes = tree, 0
        self._clean: dict[tuple[str, ...], Outcome] = {}
        copy_tree(tree)

    def judge(self, mutant: Mutant) -> tuple[str, str]:
        """Tells what becomes of a mutant, and why."""
        why = "no test reaches it"
        for files in filter(None, (test_files(mutant.path), further_files(mutant.path))):
            found = self._run_changed(mutant, files)
            why = found.why
            if not found.passed:
                return self._confirmed(found, files)
        return SURVIVES, why

    def _run_changed(self, mutant: Mutant, files: tuple[str, ...]) -> Outcome:
        file = self._tree / mutant.path
        source, times = file.read_text(), file.stat()
        file.write_text(mutant.source)
        self._changes += 1  # what is compiled of it is told from others by size and second
        os.utime(file, (times.st_mtime, int(times.st_mtime) + self._changes))
        try:
            return self._run(files)
        finally:
            file.write_text(source)
            os.utime(file, (times.st_atime, times.st_mtime))

    def _confirmed(self, found: Outcome, files: tuple[str, ...]) -> tuple[str, str]:
        """A mutant is killed by a test that passes without it."""
        tests = (found.test,) if found.test else files
        if tests not in self._clean:
            self._clean[tests] = self._run(tests)
        clean = self._clean[tests]
        return (KILLED, found.why) if clean.passed else (NOT_JUDGED, f"without any fault: {clean.why}")

    def _run(self, tests: tuple[str, ...]) -> Outcome:
        limit = max(_LEAST_S, _SLOWER * sum(seconds(test.partition("::")[0]) for test in tests))
        with tempfile.TemporaryDirectory(prefix="mutant-") as scratch:
            log = Path(scratch) / "log"
            words = ["-qx", "-p", "no:cacheprovider", "--rootdir", str(self._tree), "-m", _TESTS]
            words += [f"--timeout={_TEST_LIMIT_S}", "--basetemp", f"{scratch}/t", *tests]
            status = run_pytest(words, self._tree, log, limit)
            lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        failures = [line for line in lines if _FAILED.match(line)]
        why = f"no end within {limit:.0f} s" if status is None else (failures or lines or ["?"])[-1][:200]
        failed = _FAILED.match(why)
        # 5: all that was there is of another tier.
        return Outcome(status in (0, 5), failed[1] if failed else "", why)


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Counts, by package, those judged, killed as they were drawn and since, and equal to the source."""
    found = {}
    for package in PACKAGES:
        of_it = {name: row for name, row in rows.items() if name.startswith(f"slime/{package}/")}
        judged = {name: row for name, row in of_it.items() if row["outcome"] != NOT_JUDGED}
        alive = [name for name, row in judged.items() if row["outcome"] == SURVIVES]
        found[package] = {
            "judged": len(judged),
            "killed_as_drawn": sum(row["as_drawn"] == KILLED for row in judged.values()),
            "killed": len(judged) - len(alive),
            "equivalent": sum(name in EQUIVALENT for name in alive),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=10, help="mutants to draw of each package")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn")
    parser.add_argument("--only", choices=PACKAGES, nargs="+", default=[*PACKAGES])
    parser.add_argument("--list", action="store_true", help="what would be drawn")
    parser.add_argument("--again", action="store_true", help="only those of the seed that live")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    samples = [drawn(package, args.count, args.seed) for package in args.only]
    # Of all packages in turn, so that a run that is cut short says something of each.
    chosen = [pair for number in range(args.count) for pair in _at(samples, number)]
    if args.list:
        for label, mutant in chosen:
            print(f"{mutant.line:4} {label}", test_files(mutant.path), further_files(mutant.path))
        return
    preload()
    results = json.loads(args.output.read_text()) if args.output.exists() else {"seeds": {}}
    seed = results["seeds"].setdefault(str(args.seed), {"mutants": {}})
    rows = seed["mutants"]
    if args.again:
        chosen = [*alive(rows).items()]
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        copy = Copy(Path(directory) / "tree")
        for label, mutant in chosen:
            outcome, why = copy.judge(mutant)
            now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
            as_drawn = rows.get(label, {}).get("as_drawn", outcome)
            told = {"as_drawn": as_drawn, "outcome": outcome, "why": why, "line": mutant.line}
            rows[label] = told | {"commit": commit(), "date": now}
            print(f"{outcome:11}{label}: {why}", flush=True)
            seed["packages"] = summary(rows)
            args.output.write_text(json.dumps(results, indent=2) + "\n")


def _at(samples: list[dict[str, Mutant]], number: int) -> list[tuple[str, Mutant]]:
    return [[*sample.items()][number] for sample in samples if number < len(sample)]


if __name__ == "__main__":
    main()
