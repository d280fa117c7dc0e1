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


class ForkedEngine:
    """One engine process; its handle for the fleet, as ``SpawnedEngine`` is."""

    def __init__(self, rank: int, model_path: str, log: Path, *more: str) -> None:
        self.rank, port = rank, free_port()
        self.endpoint = EngineEndpoint(f"http://127.0.0.1:{port}", None, 1, None)
        self.client = EngineClient(self.endpoint)
        flags = ["--model-path", model_path, "--port", str(port), "--dtype", "float32", *more]
        self.process = forking().Process(target=_serve, args=(flags, str(log)), daemon=True)
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

    def updated(self, version: str) -> None:
        """Its process cannot become another one unseen."""

    def end(self) -> None:
        with self._lock:
            self.process.kill()
            self.process.join()


def _serve(flags: list[str], log: str) -> None:
    stream = os.open(log, os.O_CREAT | os.O_WRONLY, 0o600)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    sys.argv = ["embedded_engine", *flags]
    from slime.backends.embedded_engine.__main__ import main

    main()
