"""Real runs: ``python train.py ...`` in a process of its own, on a cluster that it starts itself."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from examples.calculator_tool.make_data import main as make_data
from slime.processes.reaper import Known, living, sweep
from tests.e2e.plugins import GATE
from tools.make_tiny_model import main as make_tiny_model

ROOT = Path(__file__).parents[2]
TAG = "SLIME_TEST_RUN"


@dataclass
class Run:
    """A started run.

    Its processes are those that carry ``tag`` in their environment, and those that were once seen below the
    driver (``pids``: at any time): Ray's agents overwrite their environment with a title.
    """

    process: subprocess.Popen[str]
    tag: str
    log: Path
    metrics: Path
    start: float = field(default_factory=time.monotonic)
    seen: Known = field(default_factory=dict)
    pids: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while self.process.poll() is None:
            self.seen = living(self.seen, self.process.pid)
            self.pids |= self.seen.keys()
            time.sleep(0.5)

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait(self, timeout: float = 600) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"the run did not end within {timeout} s:\n{self.output[-4000:]}")

    def expect_success(self, timeout: float = 600) -> "Run":
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

    def wait_for(self, condition: Callable[[], bool], what: str, timeout: float = 400) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{what} did not happen:\n{self.output[-4000:]}")
            time.sleep(0.1)

    def processes(self) -> dict[int, str]:
        """Living processes of the run: pid to command line."""
        found, seen = {}, living(self.seen)
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                tagged = f"{TAG}={self.tag}".encode() in (entry / "environ").read_bytes()
                if tagged or int(entry.name) in seen:
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                    if command:  # a zombie has none
                        found[int(entry.name)] = command
            except OSError:
                continue
        return found

    def pid_of(self, *fragments: str) -> int:
        """The one process whose command line holds all fragments and that is no supervisor of it."""
        pids = [
            pid
            for pid, command in self.processes().items()
            if all(f in command for f in fragments) and "supervisor" not in command
        ]
        assert pids, f"no process of the run matches {fragments}: {self.processes()}"
        return max(pids)

    def expect_no_processes(self, timeout: float = 120) -> None:
        deadline = time.monotonic() + timeout
        while survivors := self.processes():
            assert time.monotonic() < deadline, f"processes survive the run: {survivors}"
            time.sleep(0.2)


@pytest.fixture
def start(tmp_path: Path):
    """Starts a script of the project with flags; whatever is left of it is killed after the test."""
    runs: list[Run] = []

    def start_run(flags: Sequence[object], script: str = "train.py", metrics: Path | None = None) -> Run:
        tag = uuid.uuid4().hex
        log = tmp_path / f"run{len(runs)}.log"
        metrics = metrics or tmp_path / f"metrics{len(runs)}.jsonl"
        env = os.environ | {TAG: tag, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        env.pop("RAY_ADDRESS", None)
        command = [sys.executable, script, *map(str, flags), "--metrics-file", str(metrics)]
        with log.open("w") as stream:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdout=stream,
                stderr=subprocess.STDOUT,
                text=True,
                # A suite started in a script's background inherits that Ctrl-C is ignored.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        runs.append(Run(process, tag, log, metrics))
        return runs[-1]

    yield start_run
    for run in runs:
        for pid in run.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        run.expect_no_processes()
        # The run's reaper would, two seconds later; it was just killed.
        sweep(run.pids)


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``gate(64)`` makes the file for which `waiting_reward` lets samples from that number on wait."""

    def gate_before(sample: int) -> Path:
        path = tmp_path / "gate"
        monkeypatch.setenv(GATE, f"{sample}:{path}")
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
