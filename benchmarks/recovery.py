"""How soon a run has back what it lost, beside how long that took to start: trainer ranks and engines.

    python benchmarks/recovery.py [--rounds 3] [--only snapshots]

A tiny model on two ranks and two engines. Processes are forked from one that has imported everything, as in
a run on one machine, or start interpreters of their own, as in a cluster of several. Seconds, the least of
the rounds, as other programs take time too:

- a trainer group's fresh start, and until it is there again after a rank was lost, with and without standbys;
- an engine's start, and from a kill until all engines serve the trainer's weights again;
- until the run has found a rank, or an engine, that somebody has stopped (SIGSTOP);
- with a larger model, of a step: a snapshot in memory and a checkpoint on disk, and until a trainer group is
  there again from each.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.startup import TIMES_FILE, flags  # noqa: E402
from examples.calculator_tool.make_data import main as make_data  # noqa: E402
from tools.make_tiny_model import main as make_tiny_model  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "recovery.json"
TOLD, ROUNDS = "SLIME_BENCHMARK_TOLD", "SLIME_BENCHMARK_ROUNDS"
FORKS = "SLIME_FORK_WORKERS"
KINDS = {"forked": "1", "interpreters": "0"}
LIMITS = {"group again": 1.5, "group again with standbys": 0.5, "engine again": 1.5}
"""The ratios to a start stay below these."""
FOUND_WITHIN = 10.0  # seconds
SNAPSHOT_ROWS = {
    "step": "a step: rollout, training, weight update",
    "snapshot": "a snapshot in memory",
    "checkpoint": "a checkpoint on disk",
    "group again from a snapshot": "trainer group, after a rank was killed, from the snapshot",
    "group again from a checkpoint": "the same from the checkpoint",
}
_LONGEST = 600.0  # seconds for anything to happen


class Losses:
    """What a run loses, in place of its loop, and the seconds until it has that back."""

    def __init__(self, config: Any, actor: Any, rollout: Any) -> None:
        self._config, self._actor, self._rollout = config, actor, rollout
        self._rounds = int(os.environ[ROUNDS])
        self._number = 1  # of the rollout in whose training ranks are lost
        self.told: dict[str, list[float]] = {}

    def run(self) -> None:
        actor, rollout = self._actor, self._rollout
        actor.update_weights()
        if self._config.fault_tolerance.trainer_snapshots:
            self._measure_snapshots(Path(self._config.fault_tolerance.trainer_snapshots) / "actor")
            return
        self._note("engine", time.time() - psutil.Process(_engines()[-1]).create_time())
        actor.train(0, rollout.generate(0))
        actor.save_model(0, force_sync=True)
        actor.update_weights()
        self._batch = rollout.generate(1)
        for _ in range(self._rounds):
            self._lose_rank(signal.SIGKILL)
        if self._config.fault_tolerance.trainer_standbys:
            return
        for _ in range(self._rounds):
            self._lose_rank(signal.SIGSTOP)
            self._lose_engine()
            self._stop_engine()

    def _note(self, name: str, seconds: float) -> None:
        self.told.setdefault(name, []).append(seconds)

    def _lose_rank(self, number: signal.Signals, load: Path | None = None, name: str = "group again") -> None:
        import ray

        from slime.ray.losses import RanksLost

        for standby in self._actor.processes._waiting:
            _, pid = ray.get(standby.actor.process_location.remote(), timeout=_LONGEST)
            self._note("standby MB", psutil.Process(pid).memory_full_info().uss / 1e6)
        _, pid = ray.get(self._actor._actors[0].process_location.remote(), timeout=_LONGEST)
        begun = time.monotonic()
        os.kill(pid, number)
        try:
            self._actor.train(self._number, self._batch)
        except RanksLost:
            found = time.monotonic()
        self._actor.rebuild(load or self._config.checkpoints.save)
        again = time.monotonic() - found
        if number == signal.SIGSTOP:
            self._note("stopped rank found", found - begun)
        else:
            self._note(name, again)
        self._actor.update_weights()

    def _measure_snapshots(self, memory: Path) -> None:
        actor, rollout, saved = self._actor, self._rollout, Path(self._config.checkpoints.save)
        for number in range(self._rounds + 1):
            begun = time.monotonic()
            actor.train(number, rollout.generate(number))
            actor.update_weights()
            trained = time.monotonic()
            actor.try_to_save(number, True, str(memory))
            kept = time.monotonic()
            actor.save_model(number, force_sync=True)
            if number:  # the first one of each makes its process groups and directories
                self._note("step", trained - begun)
                self._note("snapshot", kept - trained)
                self._note("checkpoint", time.monotonic() - kept)
        self._note("MB", sum(path.stat().st_size for path in next(memory.glob("iter_*")).rglob("*")) / 1e6)
        self._batch, self._number = rollout.generate(self._rounds + 1), self._rounds + 1
        for _ in range(self._rounds):
            self._lose_rank(signal.SIGKILL, memory, "group again from a snapshot")
            self._lose_rank(signal.SIGKILL, saved, "group again from a checkpoint")

    def _lose_engine(self) -> None:
        begun = time.monotonic()
        os.kill(_engines()[-1], signal.SIGKILL)
        self._actor.update_weights()
        assert len(_engines()) == 2
        self._note("engine again", time.monotonic() - begun)

    def _stop_engine(self) -> None:
        begun = time.monotonic()
        os.kill(_engines()[-1], signal.SIGSTOP)
        _await(lambda: sum(row.state == "serving" for row in self._rollout.ask_fleet("rows")) < 2)
        self._note("stopped engine found", time.monotonic() - begun)
        self._actor.update_weights()


def loop(config: Any, actor: Any, critic: Any, rollout: Any, log: Any) -> None:
    losses = Losses(config, actor, rollout)
    losses.run()
    Path(os.environ[TOLD]).write_text(json.dumps(losses.told))


def _engines() -> list[int]:
    """Servers of this process's run, the youngest last."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            command, started = " ".join(process.cmdline()), process.create_time()
        except psutil.Error:
            continue
        if "slime.backends.embedded_engine" in command and "supervisor" not in command:
            found.append((started, process.pid))
    return [pid for _, pid in sorted(found)]


def _await(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LONGEST
    while not happened():
        if time.monotonic() > deadline:
            raise TimeoutError("nobody has found it")
        time.sleep(0.05)


def measure_run(directory: Path, kind: str, standbys: int, rounds: int, *more: str) -> dict[str, list[float]]:
    """Seconds of each loss of a run with ``more`` flags, and of its start."""
    place = Path(tempfile.mkdtemp(dir=directory))
    times, told, said = place / "times", place / "told", place / "said"
    env = os.environ | {TIMES_FILE: str(times), TOLD: str(told), ROUNDS: str(rounds), FORKS: KINDS[kind]}
    env |= {"OMP_NUM_THREADS": "1"}
    env.pop("RAY_ADDRESS", None)
    words = [*flags(directory), "--num-rollout", "8", "--actor-num-gpus-per-node", "2"]
    words += ["--rollout-num-gpus", "2", "--save", str(place / "saved"), "--use-fault-tolerance"]
    command = [sys.executable, __file__, "--inside", *words, "--trainer-standbys", str(standbys), *more]
    with said.open("w") as output:
        status = subprocess.run(command, cwd=ROOT, env=env, stdout=output, stderr=output).returncode
    if status:
        raise RuntimeError(f"{' '.join(command)}: exit status {status}\n{said.read_text()[-4000:]}")
    found: dict[str, list[float]] = json.loads(told.read_text())
    rows = [json.loads(line) for line in times.read_text().splitlines()]
    begun = next(row["time"] for row in rows if row["part"] == "Ray up")
    ready = [row["time"] for row in rows if row["part"] == "trainers ready"][:2]
    return {"group": [max(ready) - begun], **found}


@contextmanager
def _model_and_data(hidden_size: int, layers: int) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        size = ["--hidden-size", str(hidden_size), "--num-layers", str(layers)]
        make_tiny_model(["--output", str(directory / "model"), *size])
        rows = ["--sft-rows", "4", "--rl-rows", "64", "--eval-rows", "4"]
        make_data(["--output", str(directory / "data"), *rows])
        yield directory


def measure_snapshots(rounds: int) -> dict[str, Any]:
    """What a snapshot takes of a step, and how soon ranks are back from one, beside a checkpoint."""
    load = os.getloadavg()[0]
    with _model_and_data(512, 8) as directory:
        found = measure_run(directory, "forked", 0, rounds, "--trainer-snapshot-interval", "1")
    seconds = {name: statistics.median(found[name]) for name in SNAPSHOT_ROWS}
    return {
        "load_before": load,
        "rounds": rounds,
        "mb": round(found["MB"][0]),
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "share_of_a_step": round(seconds["snapshot"] / seconds["step"], 2),
    }


def measure(rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {"rounds": rounds, "load_before": os.getloadavg()[0]}
    with _model_and_data(64, 2) as directory:
        for kind in KINDS:
            plain = measure_run(directory, kind, 0, rounds)
            waiting = measure_run(directory, kind, 1, rounds)
            plain["group again with standbys"] = waiting["group again"]
            plain["group"] += waiting["group"]
            plain["engine"] += waiting["engine"]
            seconds = {name: min(values) for name, values in plain.items()}
            ratios = {name: seconds[name] / seconds[name.split()[0]] for name in LIMITS}
            results[kind] = {
                "seconds": {name: round(value, 2) for name, value in seconds.items()},
                "ratios": {name: round(value, 2) for name, value in ratios.items()},
                "standby_mb": round(statistics.median(waiting["standby MB"])),
            }
    results["snapshots"] = measure_snapshots(rounds)
    return results


def broken(results: dict[str, Any]) -> list[str]:
    """What takes longer than it may."""
    found = []
    for kind in KINDS:
        for name, limit in LIMITS.items():
            if (ratio := results[kind]["ratios"][name]) >= limit:
                found.append(f"{kind}: {name}: {ratio:g} of a start (wanted: under {limit:g})")
        for name, seconds in results[kind]["seconds"].items():
            if name.endswith("found") and seconds >= FOUND_WITHIN:
                found.append(f"{kind}: {name} after {seconds:g} s (wanted: under {FOUND_WITHIN:g})")
    return found


def table(results: dict[str, Any]) -> str:
    """Rows for the page."""
    names = {
        "group again": "trainer group, after a rank was killed",
        "group again with standbys": "the same with `--trainer-standbys 1`",
        "engine again": "engine, after it was killed, until it serves the trainer's weights",
    }
    lines = ["| | forked | interpreters of their own |", "|---|---|---|"]
    for name, told in names.items():
        cells = []
        for kind in KINDS:
            seconds = results[kind]["seconds"]
            start = seconds[name.split()[0]]
            cells.append(
                f"{seconds[name]:.1f} s, {results[kind]['ratios'][name]:.2f} of a start of {start:.1f} s"
            )
        lines.append(f"| {told} | {' | '.join(cells)} |")
    for name in ("stopped rank found", "stopped engine found"):
        cells = [f"{results[kind]['seconds'][name]:.1f} s" for kind in KINDS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def snapshot_table(results: dict[str, Any]) -> str:
    """Rows for the page, of snapshots."""
    seconds = results["snapshots"]["seconds"]
    rows = [f"| {told} | {seconds[name]:.1f} s |" for name, told in SNAPSHOT_ROWS.items()]
    return "\n".join(["| | median |", "|---|---|", *rows])


def main() -> int:
    if sys.argv[1:2] == ["--inside"]:
        from slime.ray.session import main as run

        run(loop, argv=sys.argv[2:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--only", choices=["snapshots"], help="measure these; the rest stays as it was")
    options = parser.parse_args()
    if options.only:
        results = json.loads(RESULTS.read_text()) | {"snapshots": measure_snapshots(options.rounds)}
    else:
        results = measure(options.rounds)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(table(results))
    print(snapshot_table(results))
    for line in broken(results):
        print(line, file=sys.stderr)
    return int(bool(broken(results)))


if __name__ == "__main__":
    sys.exit(main())
