"""Real runs: ``python train.py ...``, in the session's Ray cluster or in one that they start themselves."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Self

import pytest

from examples.calculator_tool.make_data import main as make_data
from slime.processes.forked import ForkedProcess
from slime.processes.reaper import SHARED_MEMORY, Known, living, sweep
from tests.e2e.plugins import GATE
from tests.engines import free_port
from tests.warm_cluster import WarmCluster
from tools.make_tiny_model import main as make_tiny_model

ROOT = Path(__file__).parents[2]
TAG = "SLIME_TEST_RUN"


class Run(ABC):
    """A started run."""

    def __init__(self, process: ForkedProcess | subprocess.Popen[str], log: Path, metrics: Path) -> None:
        self.process, self.log, self.metrics = process, log, metrics

    @abstractmethod
    def processes(self) -> dict[int, str]:
        """Living processes of the run: pid to command line."""

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait(self, timeout: float = 600) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"the run did not end within {timeout} s:\n{self.output[-4000:]}")

    def expect_success(self, timeout: float = 600) -> Self:
        status = self.wait(timeout)
        assert status == 0, f"exit status {status}:\n{self.output[-6000:]}"
        return self

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def rows(self, axis: str) -> dict[int, dict[str, float]]:
        """Metrics by step; several rows of a step are merged, later ones win."""
        merged: dict[int, dict[str, float]] = {}
        if self.metrics.exists():
            for line in self.metrics.read_text().split("\n")[:-1]:  # the last one may be half written
                row = json.loads(line)
                if row["axis"] == axis:
                    merged.setdefault(row["step"], {}).update(row)
        return merged

    def names(self) -> set[str]:
        """Names in all rows of metrics."""
        return {
            name for axis in ("rollout", "train", "eval") for row in self.rows(axis).values() for name in row
        }

    def books(self) -> dict[int, dict[str, float]]:
        """The books on groups after each rollout, which must balance."""
        accounts = ("issued", "trained", "filtered", "dropped", "buffered", "leased", "unbalanced")
        rows = self.rows("rollout")
        found = {
            step: {name: row[f"rollout/ledger/{name}"] for name in accounts} for step, row in rows.items()
        }
        for step, books in found.items():
            assert books["unbalanced"] == 0 and sum(books.values()) == 2 * books["issued"], (step, books)
        return found

    def written_twice(self) -> set[str]:
        """Metrics that two rows of one step have; of a run that repeated no step there should be none."""
        rows = [json.loads(line) for line in self.metrics.read_text().splitlines()]
        counted = Counter((row["axis"], row["step"], name) for row in rows for name in row if "/" in name)
        return {name for (_, _, name), count in counted.items() if count > 1}

    def wait_for(self, condition: Callable[[], bool], what: str, timeout: float = 400) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{what} did not happen:\n{self.output[-4000:]}")
            time.sleep(0.1)

    def pids_of(self, *fragments: str) -> list[int]:
        """The processes whose command line holds all fragments and that are no supervisors of such."""
        return [
            pid
            for pid, command in self.processes().items()
            if all(f in command for f in fragments) and "supervisor" not in command
        ]

    def pid_of(self, *fragments: str) -> int:
        """The youngest of them. One that changes its title at this moment has none."""
        deadline = time.monotonic() + 60
        while not (pids := self.pids_of(*fragments)):
            assert time.monotonic() < deadline, f"none matches {fragments}: {self.processes()}"
            time.sleep(0.05)
        return max(pids)

    def engines(self) -> list[int]:
        return self.pids_of("slime.backends.embedded_engine")

    def expect_no_processes(self, timeout: float = 120) -> None:
        deadline = time.monotonic() + timeout
        while survivors := self.processes():
            assert time.monotonic() < deadline, f"processes survive the run: {survivors}"
            time.sleep(0.2)


class WarmRun(Run):
    """A run in the session's cluster: nothing else is in it meanwhile."""

    def __init__(self, cluster: WarmCluster, words: list[str], log: Path, metrics: Path) -> None:
        self._cluster = cluster
        changed = {name: value for name, value in os.environ.items() if name.startswith("SLIME_TEST_")}
        super().__init__(cluster.start(words, log, changed), log, metrics)

    def processes(self) -> dict[int, str]:
        return self._cluster.processes()


class OwnRun(Run):
    """A run with a cluster of its own.

    Its processes are those that carry a tag in their environment, and those that were once seen below the
    driver: Ray's agents overwrite their environment with a title.
    """

    def __init__(self, words: list[str], log: Path, metrics: Path, address: str | None = None) -> None:
        self._tag = uuid.uuid4().hex
        self._not_ours = frozenset(os.listdir(SHARED_MEMORY))  # of processes whose numbers may come again
        env = os.environ | {TAG: self._tag, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        env.pop("RAY_ADDRESS", None)
        # A cluster of the tests asks for no token, whether or not this user has one.
        env |= {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"} if address else {}
        with log.open("w") as stream:
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=ROOT,
                env=env,
                stdout=stream,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # a process group, to which signals may go
                # A suite started in a script's background inherits that Ctrl-C is ignored.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        super().__init__(process, log, metrics)
        self._seen: Known = {}
        self._pids: set[int] = set()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while self.process.poll() is None:
            self._seen = living(self._seen, self.process.pid)
            self._pids |= self._seen.keys()
            time.sleep(0.5)

    def processes(self) -> dict[int, str]:
        found, seen = {}, living(self._seen)
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                tagged = f"{TAG}={self._tag}".encode() in (entry / "environ").read_bytes()
                if tagged or int(entry.name) in seen:
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                    if command:  # a zombie has none
                        found[int(entry.name)] = command
            except OSError:
                continue
        return found

    def expect_no_processes(self, timeout: float = 120) -> None:
        super().expect_no_processes(timeout)
        files = set(os.listdir(SHARED_MEMORY)) - self._not_ours
        shared = [name.split("_")[1] for name in files if name.startswith("torch_")]
        left = self._pids & {int(pid) for pid in shared if pid.isdigit()}
        assert not left, f"processes {left} have left shared memory"

    def end(self) -> None:
        """Kills what is left of it."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        super().expect_no_processes()
        # The run's reaper would, two seconds later; it was just killed.
        sweep(self._pids)


Start = Callable[..., Run]


@pytest.fixture(scope="package")
def cluster() -> Iterator[WarmCluster]:
    """The Ray cluster of whole runs; it ends when they have. Nothing of it is lost on purpose."""
    with closing(WarmCluster()) as cluster:
        yield cluster


@pytest.fixture
def start(tmp_path: Path, cluster: WarmCluster) -> Iterator[Start]:
    """Starts a script of the project with flags, in the session's cluster; it must leave nothing there."""
    runs: list[Run] = []

    def start_run(flags: Sequence[object], script: str = "train.py", metrics: Path | None = None) -> Run:
        runs.append(WarmRun(cluster, *_command(tmp_path, len(runs), script, flags, metrics)))
        return runs[-1]

    yield start_run
    for run in runs:
        run.kill()
    try:
        cluster.sweep()
    except AssertionError:
        cluster.kill_all()
        raise


@pytest.fixture
def start_alone(tmp_path: Path) -> Iterator[Start]:
    """Starts a run with a cluster of its own, or with one that the test has made and names by its address;
    whatever is left of the run is killed after the test.
    """
    runs: list[OwnRun] = []

    def start_run(
        flags: Sequence[object],
        script: str = "train.py",
        metrics: Path | None = None,
        address: str | None = None,
    ) -> Run:
        runs.append(OwnRun(*_command(tmp_path, 10 + len(runs), script, flags, metrics), address))
        return runs[-1]

    yield start_run
    for run in runs:
        run.end()


def _command(
    directory: Path, number: int, script: str, flags: Sequence[object], metrics: Path | None
) -> tuple[list[str], Path, Path]:
    """The words behind ``python``, the log, and the file of metrics."""
    metrics = metrics or directory / f"metrics{number}.jsonl"
    words = [script, *map(str, flags), "--metrics-file", str(metrics)]
    return words, directory / f"run{number}.log", metrics


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``gate(64)`` names a file, for which `waiting_reward` lets samples from that number on wait."""
    entries: list[str] = []

    def gate_before(sample: int) -> Path:
        path = tmp_path / f"gate{sample}"
        entries.append(f"{sample}:{path}")
        monkeypatch.setenv(GATE, ",".join(entries))
        return path

    return gate_before


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny Qwen3 with its tokenizer."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(["--output", str(path), "--hidden-size", "64", "--num-layers", "2"])
    return path


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sft.jsonl, rl.jsonl and eval.jsonl of the calculator task."""
    path = tmp_path_factory.mktemp("data")
    rows = ["--sft-rows", "64", "--rl-rows", "64", "--eval-rows", "8"]
    make_data(["--output", str(path), *rows])
    return path


@pytest.fixture(scope="session")
def rl_flags(model: Path, data: Path) -> list[object]:
    """A small GRPO run: 2 rollouts of 4 prompts x 4 samples, one optimizer step each."""
    return [
        *("--hf-checkpoint", model, "--fp32", "--num-gpus-per-node", 8, "--seed", 7),
        *("--prompt-data", data / "rl.jsonl", "--input-key", "prompt", "--label-key", "label"),
        *("--apply-chat-template", "--rollout-max-response-len", 12),
        *("--custom-rm-path", "tests.e2e.plugins.token_parity_reward"),
        *("--num-rollout", 2, "--rollout-batch-size", 4, "--n-samples-per-prompt", 4),
        *("--global-batch-size", 16, "--use-dynamic-batch-size", "--max-tokens-per-gpu", 512),
        *("--advantage-estimator", "grpo", "--lr", 1e-4, "--weight-decay", 0.0),
        *("--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 1),
    ]


@pytest.fixture
def buffer_url(tmp_path: Path):
    """The service of the rollout buffer, in a process of its own."""
    port = free_port()
    command = [sys.executable, "-m", "slime_plugins.rollout_buffer.buffer", "--port", str(port)]
    command += ["--file", str(tmp_path / "buffer.sqlite")]
    with (tmp_path / "buffer.log").open("w") as log:
        service = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        service.kill()
        service.wait()
