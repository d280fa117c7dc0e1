"""Histories of the control plane under simulation: how many a minute, whether all hold, which bugs are found.

    python benchmarks/simulate.py [--histories 10000] [--first 0] [--bugs 1000] [--processes 2]
    python benchmarks/simulate.py --seed 17                                      # one, with its trace
    python benchmarks/simulate.py --seed 17 --bug "the version of the weights falls"

The product's driver, trainer groups, rollout manager, fleet, weight update, rollout functions, data source
and ledger live whole runs in one process (tests/simulation); engines die and hang, routers and rollout
managers are killed, messages are late or lost, whole runs are killed and resumed. ``--bugs`` plants each bug
of tests/simulation/bugs.py and plays that many histories at most until one finds it. Ends with status 1 if a
history does not hold, or a bug was not found; says which seed, and how to see it again.
"""

import argparse
import datetime
import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.nightly import commit  # noqa: E402
from tests.simulation.bugs import BUGS, planted  # noqa: E402
from tests.simulation.history import Found, play  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "simulate.json"
_AT_ONCE = 50  # histories that a process is given


def prepare() -> None:
    """What is there before the first history is not looked through again by the garbage collector."""
    play(0)
    gc.collect()
    gc.freeze()


def histories(first: int, last: int) -> dict[str, Any]:
    """What has become of these seeds: counts, and the messages of those that do not hold."""
    counts: Counter[str] = Counter()
    failures = []
    for seed in range(first, last):
        try:
            history = play(seed)
        except Found as error:
            failures.append(str(error))
            continue
        counts["trained" if history.outcome == "trained" else "ended by faults, with an error"] += 1
        counts["events"] += history.events
        counts["faults of engines"] += history.faults
        counts["routers killed"] += history.router_faults
        counts["rollout managers killed"] += history.manager_faults
        counts["engines drained"] += history.drained
        counts["engines added"] += history.added
        counts["runs killed and resumed"] += history.resumed
        counts["virtual hours"] += history.seconds / 3600
    return {"counts": counts, "failures": failures}


def found_after(most: int, name: str) -> int | None:
    """How many histories it takes to find a bug; None if that many do not."""
    with planted(name):
        for seed in range(most):
            try:
                play(seed)
            except Found:
                return seed + 1
    return None


def show(seed: int, bug: str | None) -> None:
    """Prints the trace of a history, and what has become of it."""
    with planted(bug) if bug else nullcontext():
        try:
            history = play(seed, traced=True)
        except Found as error:
            print("\n".join([*error.lines, str(error), f"trace {error.digest}"]))
            sys.exit(1)
    print("\n".join([*history.lines, f"{history.outcome}", f"trace {history.digest}"]))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All histories, then all bugs."""
    counts: Counter[str] = Counter()
    failures: list[str] = []
    context = get_context("spawn")
    with ProcessPoolExecutor(options.processes, context, initializer=prepare) as pool:
        list(pool.map(_warm, range(options.processes)))
        start, end = time.monotonic(), options.first + options.histories
        firsts = range(options.first, end, _AT_ONCE)
        lasts = [min(first + _AT_ONCE, end) for first in firsts]
        for part in pool.map(histories, firsts, lasts):
            counts.update(part["counts"])
            failures += part["failures"]
        minutes = (time.monotonic() - start) / 60
        bugs = (
            dict(zip(BUGS, pool.map(partial(found_after, options.bugs), BUGS), strict=True))
            if options.bugs
            else {}
        )
    return {
        "processes": options.processes,
        "histories": options.histories,
        "minutes": round(minutes, 2),
        "histories_per_minute": round(options.histories / minutes) if options.histories else None,
        "counts": {name: round(count) for name, count in counts.items()},
        "failures": failures,
        "bugs_found_after": bugs,
    }


def _at_least(least: int, word: str) -> int:
    """Raises argparse's own error, which names the flag."""
    if not word.isdecimal() or int(word) < least:
        raise argparse.ArgumentTypeError(f"{word!r} (wanted: a whole number from {least} on)")
    return int(word)


def _warm(number: int) -> None:
    """Has a process imported everything before the clock runs."""
    time.sleep(0.5)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    natural, some = partial(_at_least, 0), partial(_at_least, 1)
    parser.add_argument("--histories", type=natural, default=10_000)
    parser.add_argument("--first", type=natural, default=0, help="seed of the first history")
    parser.add_argument("--bugs", type=natural, default=0, help="histories at most for each planted bug")
    parser.add_argument("--processes", type=some, default=2)
    parser.add_argument("--seed", type=natural, help="play this one alone, and print its trace")
    parser.add_argument("--bug", choices=BUGS, help="with --seed: what is planted")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    if options.bug and options.seed is None:
        parser.error(
            "argument --bug: it is planted in one history (wanted: --seed, or --bugs for all of them)"
        )
    if options.seed is not None:
        show(options.seed, options.bug)
        return
    date = datetime.datetime.now(datetime.UTC)
    results = {"date": date.isoformat(timespec="minutes"), "commit": commit()} | measure(options)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=1) + "\n")
    print(
        f"{results['histories']} histories, {results['histories_per_minute']} a minute: {results['counts']}"
    )
    missed = [name for name, count in results["bugs_found_after"].items() if count is None]
    if results["failures"] or missed:
        sys.exit("\n".join([*results["failures"], *(f"not found: {name}" for name in missed)]))


if __name__ == "__main__":
    main()
