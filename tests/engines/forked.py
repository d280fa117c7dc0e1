"""Embedded engines as the fleet sees them, forked so that they start in a fraction of a second."""

import os
import sys
import threading
from pathlib import Path

from slime.backends.sglang_utils.client import EngineClient
from slime.processes.stopped import StopClock, is_stopped
from slime.utils.types import EngineEndpoint
from tests.engines import free_port
from tests.forking import forking

STOPPED_LIMIT = 0.3  # seconds, of a run 15
BEGUN = 8  # tokens of a response by which it is in its middle


class Blow:
    """Makes one engine send itself a signal in the middle of a response: whichever gets there first.

    Engines look for it between two steps: it strikes while requests are in flight, however slow anybody is.

    Args:
        directory: of this test's own, the same for all its engines.
    """

    def __init__(self, directory: Path) -> None:
        self._file, self._taken = directory / "blow", directory / "blow_taken"

    def order(self, signum: int) -> None:
        """One blow; the last one, if any, must have struck."""
        self._taken.unlink(missing_ok=True)
        written = self._file.with_suffix(".new")
        written.write_text(str(int(signum)))
        written.replace(self._file)

    @property
    def struck(self) -> int | None:
        """The process id of the engine that took the last one."""
        try:
            return int(self._taken.read_text())
        except FileNotFoundError:
            return None

    def obey(self) -> None:
        """Does as an engine whose responses have begun and are to go on."""
        mine = self._file.with_suffix(f".{os.getpid()}")
        try:
            self._file.rename(mine)
        except FileNotFoundError:  # none, or another engine was faster
            return
        signum = int(mine.read_text())
        mine.write_text(str(os.getpid()))
        mine.rename(self._taken)
        os.kill(os.getpid(), signum)


class ForkedEngine:
    """One engine process; its handle for the fleet, as ``SpawnedEngine`` is.

    Args:
        blows: the directory of ``Blow``, if it obeys one.
    """

    def __init__(self, rank: int, model_path: str, log: Path, *more: str, blows: Path | None = None) -> None:
        context = forking()
        self.rank, port = rank, free_port()
        self.endpoint = EngineEndpoint(f"http://127.0.0.1:{port}", None, 1, None)
        self.client = EngineClient(self.endpoint)
        flags = ["--model-path", model_path, "--port", str(port), "--dtype", "float32", *more]
        self.process = context.Process(target=_serve, args=(flags, str(log), blows), daemon=True)
        self.process.start()
        self._clock, self._lock = StopClock(), threading.Lock()

    def wait_ready(self) -> None:
        """Returns when it serves."""
        pause = threading.Event()
        while not self.client.serves():
            assert self.process.exitcode is None, f"engine {self.rank} ended"
            pause.wait(0.05)

    def failure_reason(self) -> str | None:
        with self._lock:
            if self.process.exitcode is not None:
                return f"exit status {self.process.exitcode}"
            stopped = [self.process.pid] if is_stopped(self.process.pid) else []
            return "is stopped (SIGSTOP)" if self._clock.overdue(stopped, STOPPED_LIMIT) else None

    def processes(self) -> list[tuple[str, int]]:
        return [("node", self.process.pid)]

    def updated(self, version: str) -> None:
        """Its process cannot become another one unseen."""

    def end(self) -> None:
        with self._lock:
            self.process.kill()
            self.process.join()


def _serve(flags: list[str], log: str, blows: Path | None) -> None:
    stream = os.open(log, os.O_CREAT | os.O_WRONLY, 0o600)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    sys.argv = ["embedded_engine", *flags]
    from slime.backends.embedded_engine.__main__ import main

    if blows is not None:
        _let_strike(Blow(blows))
    main()


def _let_strike(blow: Blow) -> None:
    from slime.backends.embedded_engine.scheduler import Scheduler

    step = Scheduler.step

    def step_and_obey(self: Scheduler, admit: bool) -> None:
        step(self, admit)
        if any(len(sequence.output_ids) >= BEGUN for sequence in self.running):
            blow.obey()

    Scheduler.step = step_and_obey  # type: ignore[method-assign]
