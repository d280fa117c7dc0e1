"""One Ray cluster for many runs of tests, and one process of which they and their workers are forked.

with closing(WarmCluster()) as cluster:
    driver = cluster.start(["train.py", *flags], log)     # as ``python train.py ...``, without the seconds
    driver.wait()
    cluster.sweep()                                       # fails if the run has left anything

What a run must do with a cluster of its own (start it, end it, survive the loss of its processes) is tested
with one of its own.
"""

import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from slime.processes.forked import ForkedProcess, ForkServer, worker_python
from slime.processes.reaper import SHARED_MEMORY, sweep

ROOT = Path(__file__).parents[1]
GPUS = 8
_LEAVE_TIMEOUT = 120.0  # seconds that a run's processes have to be gone after its driver
_WATCH_INTERVAL = 0.5  # seconds
# What drivers import beyond what workers do. Ray may not be among it.
_OF_DRIVERS = (
    "slime.arguments.registry",
    "slime.arguments.core.parser",
    "slime.observability.console",
    "rich.console",
)


class WarmCluster:
    """Ray, started once, and the fork server; all ends on exit."""

    def __init__(self) -> None:
        # Their owners are gone: a process of ours may be given the same number.
        self._not_ours = frozenset(os.listdir(SHARED_MEMORY))
        self._env = _environment()
        self._server = ForkServer(self._env)
        self._server.preload(_modules())
        self._head = self._start_head()
        self.address: str = self._answer()["address"]
        self._seen: set[int] = set()
        threading.Thread(target=self._watch, daemon=True).start()

    def _start_head(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "tests.warm_head", worker_python(self._server), str(GPUS)]
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=self._env | {"SLIME_FORK_SERVER": self._server.address},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def _watch(self) -> None:
        while self._head.poll() is None:
            self._seen |= self.processes().keys()
            time.sleep(_WATCH_INTERVAL)

    def start(self, words: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> ForkedProcess:
        """``python WORD ...`` as a driver that joins. ``env`` is seen by its workers as well."""
        own = dict(env or {})
        joins = {
            "RAY_ADDRESS": self.address,
            "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"env_vars": own}}),
            "PYTHONUNBUFFERED": "1",
            # It knows how workers ended, as that of a run with a cluster of its own does.
            "SLIME_FORK_SERVER": self._server.address,
        }
        with log.open("ab") as output, open(os.devnull, "rb") as nothing:
            files = (nothing.fileno(), output.fileno(), output.fileno())
            return ForkedProcess(
                self._server.address, words, files=files, env=self._env | own | joins, cwd=str(ROOT)
            )

    def processes(self) -> dict[int, str]:
        """Living processes of the runs that have joined: process id to command line."""
        found = {}
        try:
            processes = psutil.Process(self._server.pid).children(recursive=True)
        except psutil.NoSuchProcess:  # the cluster has been closed
            return {}
        for process in processes:
            try:
                if process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = " ".join(process.cmdline()).strip()
            except psutil.NoSuchProcess:
                continue
        return found

    def sweep(self) -> None:
        """Waits until nothing is left of the runs.

        Raises:
            AssertionError: a process, an actor, a placement group or shared memory stays.
        """
        deadline = time.monotonic() + _LEAVE_TIMEOUT
        while left := [*self.processes().values(), *self._left_in_ray(), *self._shared_memory()]:
            assert time.monotonic() < deadline, f"left in the cluster: {left}"
            time.sleep(0.05)
        self._seen.clear()

    def _shared_memory(self) -> list[str]:
        """Files of torch in memory whose owners were of these runs."""
        prefixes = tuple(f"torch_{pid}_" for pid in self._seen)
        files = set(os.listdir(SHARED_MEMORY)) - self._not_ours
        return [name for name in files if name.startswith(prefixes)]

    def kill_all(self) -> None:
        """Ends what a failed run has left, so that the next test does not meet it."""
        for pid in self.processes():
            try:
                psutil.Process(pid).kill()
            except psutil.NoSuchProcess:
                continue
        sweep(self._seen)
        self._seen.clear()

    def _left_in_ray(self) -> list[str]:
        assert self._head.stdin is not None
        self._head.stdin.write("\n")
        self._head.stdin.flush()
        left: list[str] = self._answer()["left"]
        return left

    def _answer(self) -> Any:
        line = self._line()
        assert line, "the head of the tests' Ray cluster has ended"
        return json.loads(line)

    def _line(self) -> str:
        """What the head says next; empty if it has ended."""
        assert self._head.stdout is not None
        return self._head.stdout.readline()

    def close(self) -> None:
        assert self._head.stdin is not None
        self._head.stdin.close()
        self._head.wait(60)
        self._server.close()


def _environment() -> dict[str, str]:
    """Returns the environment that a run would give its workers, so that these can be forked."""
    from slime.ray.node import process_env

    own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLIME_"))}
    os_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = {"PYTHONPATH": os.pathsep.join(dict.fromkeys([str(ROOT), *filter(None, os_path)]))}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    idle = {"RAY_prestart_worker_first_driver": "0", "RAY_task_events_report_interval_ms": "0"}
    return own | process_env(trainer=True) | path | token | idle


def _modules() -> list[str]:
    from slime.config.trainers import TRAINERS
    from slime.ray.preload import modules_of
    from tests.run_args import config_with

    runs = [config_with(train_backend=backend, rollout_engine="embedded") for backend in TRAINERS]
    found = [module for run in runs for module in modules_of(run)]
    return list(dict.fromkeys([*found, *_OF_DRIVERS]))
