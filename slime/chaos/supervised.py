"""A run in a process of its own: the one that is disturbed, or its twin."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from slime.processes.restarts import end_with_parent

_STARTS_AGAIN = re.compile(r"^supervisor: .*it starts again", re.MULTILINE)
_TAIL = 15
PROGRAM = (sys.executable, "-m", "slime.cli", "train")


class StartedRun:
    """``slime train`` with its output in a file."""

    def __init__(self, words: Sequence[str], directory: Path, environment: dict[str, str]) -> None:
        """
        Args:
            words: flags; those of its directory, its checkpoints and its metrics are put behind them.
            directory: of the run; its output is in the file of this name with ``.log``.
            environment: variables beside those of this process.
        """
        self.directory, self.metrics = directory, directory / "metrics.jsonl"
        self.log = directory.with_suffix(".log")
        places = [f"--{name}={directory}" for name in ("run-dir", "save", "load")]
        command = [*PROGRAM, *words, *places, f"--metrics-file={self.metrics}"]
        path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        self.pid, self.started = self._process.pid, time.monotonic()

    @property
    def status(self) -> int | None:
        """Exit status; None while it runs."""
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit status.

        Raises:
            subprocess.TimeoutExpired: it runs on after ``timeout`` seconds.
        """
        return self._process.wait(timeout)

    def end(self, timeout_s: float = 60.0) -> None:
        """Asks it to end, and kills it if it does not."""
        if self.status is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def steps(self) -> int:
        """How many rows of optimizer steps were written so far, repeated ones among them."""
        try:
            return self.metrics.read_bytes().count(b'"axis":"train"')
        except FileNotFoundError:
            return 0

    def restarts(self) -> int:
        """How often its supervisor has started it again."""
        return len(_STARTS_AGAIN.findall(self.log.read_text(errors="replace")))

    def tail(self) -> str:
        """The last lines of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_TAIL:])
