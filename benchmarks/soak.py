"""A run of an hour and a half with a fault every few minutes: what grows, and whether it becomes slower.

    python benchmarks/soak.py [--minutes 90] [--fault-every 4] [--layout "two ranks, engines replaced"]

A layout of `benchmarks/chaos.py` under ``--supervise``. Every few seconds the memory that each of its
processes holds, its descriptors and threads are noted, with the bytes of shared memory, logs and the run's
directory; every few minutes one of the processes is killed, stopped or paused, or nobody with
``--fault-every 0``. Of each process that lived long enough, what it held after the warm-up stands beside
what it held at the end; steps per second are the median over the seconds of a window, so that a recovery
does not count as slowness. The run is ended by SIGTERM, and must leave nothing.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402

from benchmarks.chaos import LAYOUTS, flags, prepare  # noqa: E402
from slime.chaos.faults import Kind, strike  # noqa: E402
from slime.chaos.supervised import StartedRun  # noqa: E402
from slime.chaos.victims import MARK, RunProcesses, command_line  # noqa: E402
from slime.cli.chaos import left_behind  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "soak.json"
LOOK_S = 5.0
NO_END = 10_000_000
"""Rollouts that no soak reaches."""
FIRST, LAST = (0.0, 0.25), (0.75, 1.0)
"""The parts of a life after the warm-up that are held against one another."""


@dataclass
class Life:
    """What a process held at each look.

    Attributes:
        at: seconds since the start of the run.
        memory: bytes that are no file's. Those that it shares with the process that it was forked from are
            among them: it copies one after the other, and grows by none of that.
    """

    role: str
    at: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)


@dataclass
class Look:
    """What the run as a whole held."""

    at: float
    steps: int
    shared_memory: int
    log: int
    directory: int


def name_of(role: str | None, command: str) -> str:
    """The role, or the program and its first words."""
    return role or " ".join(Path(word).name for word in command.split()[:3])[:60]


def measure_process(life: Life, pid: int, at: float) -> None:
    """Notes nothing if it is gone."""
    try:
        process = psutil.Process(pid)
        held = process.memory_info()
        memory = held.rss - held.shared
        descriptors, threads = process.num_fds(), process.num_threads()
    except psutil.Error:
        return
    life.at.append(at)
    life.memory.append(memory)
    life.descriptors.append(descriptors)
    life.threads.append(threads)


def size_of(directory: Path) -> int:
    """Bytes of all files in it."""
    total = 0
    for place, _, names in os.walk(directory):  # which passes over directories that have gone
        for name in names:
            try:
                total += os.stat(os.path.join(place, name)).st_size
            except OSError:
                continue  # gone since it was listed
    return total


class Soak:
    """Looks at a run and strikes it."""

    def __init__(self, run: StartedRun, processes: RunProcesses, seed: int) -> None:
        self._run, self._processes, self._random = run, processes, random.Random(seed)
        self.lives: dict[int, Life] = {}
        self.looks: list[Look] = []
        self.faults: list[dict[str, Any]] = []

    def until(self, seconds: float, fault_every: float) -> None:
        """
        Args:
            fault_every: seconds between faults; 0 for none.
        """
        next_fault = self._now() + fault_every if fault_every else float("inf")
        while self._run.status is None and self._now() < seconds:
            self._look()
            if self._now() >= next_fault:
                self._strike()
                next_fault += fault_every
            time.sleep(LOOK_S)

    def _now(self) -> float:
        return time.monotonic() - self._run.started

    def _look(self) -> None:
        pids = self._processes.look_everywhere() | {self._run.pid}
        roles = {pid: role for role, members in self._processes.roles().items() for pid in members}
        for pid in pids:
            if pid not in self.lives and (command := command_line(pid)):
                self.lives[pid] = Life(name_of(roles.get(pid), command))
            if pid in self.lives:
                measure_process(self.lives[pid], pid, self._now())
        shared = size_of(Path("/dev/shm"))
        log = self._run.log.stat().st_size
        self.looks.append(Look(self._now(), self._run.steps(), shared, log, size_of(self._run.directory)))

    def _strike(self) -> None:
        roles = self._processes.roles()
        role = self._random.choice(sorted(roles))
        pid, kind = self._random.choice(roles[role]), self._random.choice(list(Kind))
        if strike(kind, pid):
            self.faults.append({"at": round(self._now(), 1), "kind": kind, "role": role})
            print(f"{self._now():8.1f} s  {kind} {role} (process {pid})", flush=True)


def part(values: Sequence[float], where: tuple[float, float]) -> list[float]:
    """The values of a part of all, one at least."""
    begin = min(int(where[0] * len(values)), len(values) - 1)
    return list(values[begin : max(begin + 1, int(where[1] * len(values)))])


def growth(life: Life, warm_up: float) -> dict[str, Any] | None:
    """Medians of the first and the last quarter after the warm-up of its own; None for a life too short.

    ``megabytes`` are those of each tenth of its whole life.
    """
    begin = life.at[0] + warm_up if life.at else 0.0
    chosen = [index for index, at in enumerate(life.at) if at >= begin]
    if len(chosen) * LOOK_S < warm_up:
        return None
    tenths = [(number / 10, (number + 1) / 10) for number in range(10)]
    found: dict[str, Any] = {
        "role": life.role,
        "seconds": round(life.at[-1] - life.at[0]),
        "megabytes": [round(statistics.median(part(life.memory, where)) / 1e6, 1) for where in tenths],
    }
    for name in ("memory", "descriptors", "threads"):
        values = [getattr(life, name)[index] for index in chosen]
        first, last = statistics.median(part(values, FIRST)), statistics.median(part(values, LAST))
        found[name] = {"first": first, "last": last, "ratio": round(last / first, 4) if first else None}
    return found


def rates(looks: Sequence[Look]) -> list[float]:
    """Steps per second between two looks."""
    return [(b.steps - a.steps) / (b.at - a.at) for a, b in itertools.pairwise(looks)]


def windows(looks: Sequence[Look], warm_up: float, seconds: float) -> dict[str, Any]:
    """The first window after the warm-up beside the last one."""
    first = [look for look in looks if warm_up <= look.at <= warm_up + seconds]
    last = [look for look in looks if look.at >= looks[-1].at - seconds]
    speed = [statistics.median(rates(chosen)) if len(chosen) > 1 else 0.0 for chosen in (first, last)]
    steps = [chosen[-1].steps - chosen[0].steps for chosen in (first, last)]
    log = [
        (chosen[-1].log - chosen[0].log) / max(1, n) for chosen, n in zip((first, last), steps, strict=True)
    ]
    return {
        "steps_per_second": {"first": speed[0], "last": speed[1], "ratio": round(speed[1] / speed[0], 4)},
        "log_bytes_per_step": {"first": log[0], "last": log[1]},
        "shared_memory": [max(look.shared_memory for look in chosen) for chosen in (first, last)],
        "directory": [chosen[-1].directory for chosen in (first, last)],
    }


def summary(soak: Soak, warm_up: float, window: float) -> dict[str, Any]:
    """What the soak has found."""
    lives = [found for life in soak.lives.values() if (found := growth(life, warm_up))]
    lives.sort(key=lambda found: -found["memory"]["ratio"])
    return {
        "minutes": round(soak.looks[-1].at / 60, 1),
        "steps": soak.looks[-1].steps,
        "faults": soak.faults,
        "windows": windows(soak.looks, warm_up, window),
        "processes": lives,
    }


def rows(found: dict[str, Any]) -> Iterator[str]:
    """Lines for people."""
    yield f"{found['minutes']} minutes, {found['steps']} steps, {len(found['faults'])} faults"
    yield json.dumps(found["windows"])
    for life in found["processes"]:
        memory, descriptors = life["memory"], life["descriptors"]
        yield (
            f"{life['role']:60} {life['seconds']:6} s  {memory['first'] / 1e6:8.1f} -> "
            f"{memory['last'] / 1e6:8.1f} MB ({memory['ratio']})  {descriptors['first']:.0f} -> "
            f"{descriptors['last']:.0f} fds"
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=90.0)
    parser.add_argument("--fault-every", type=float, default=4.0, help="minutes; 0 for no faults")
    parser.add_argument("--warm-up", type=float, default=5.0, help="minutes, of the run and each process")
    parser.add_argument("--layout", default="two ranks, engines replaced", choices=list(LAYOUTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="keeps the run here")
    parser.add_argument("--output", type=Path, default=RESULTS)
    asked = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as scratch:
        directory = asked.keep or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        prepare(directory)
        mark = uuid.uuid4().hex
        words = [*flags(directory, LAYOUTS[asked.layout], NO_END), "--supervise"]
        words[words.index("--save-interval") + 1] = "20"
        words[words.index("--max-restarts") + 1] = "100"
        started = StartedRun(words, directory / "run", {MARK: mark})
        processes = RunProcesses(started.pid, mark)
        soak = Soak(started, processes, asked.seed)
        try:
            soak.until(60 * asked.minutes, 60 * asked.fault_every)
            status = started.status
        finally:
            started.end()
        problems = list(left_behind(processes))
        if status is not None:
            problems.append(f"the run ended with exit status {status}:\n{started.tail()}")
    found = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "layout": asked.layout,
        "problems": problems,
        **summary(soak, 60 * asked.warm_up, 60 * min(20.0, asked.minutes / 4)),
    }
    asked.output.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(rows(found)), *problems, sep="\n")


if __name__ == "__main__":
    main()
