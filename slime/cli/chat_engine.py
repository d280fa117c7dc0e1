"""The engine that ``slime chat DIRECTORY`` starts, and ends."""

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from slime.cli.chat_model import ChatFailed
from slime.processes.child import ManagedProcess
from slime.utils.addresses import find_available_port

_FIRST_PORT = 31_000
_START_SECONDS = 600.0


@contextmanager
def served(model: str) -> Iterator[str]:
    """The URL of a server; for a directory the embedded engine is started, and ended on exit."""
    if model.startswith(("http://", "https://")):
        yield model
        return
    if not (Path(model) / "config.json").is_file():
        raise ChatFailed("no config.json there (wanted: http://HOST:PORT, or a checkpoint's directory)")
    port = find_available_port(_FIRST_PORT)
    command = [
        sys.executable,
        "-m",
        "slime.backends.embedded_engine",
        "--model-path",
        model,
        "--port",
        str(port),
    ]
    with tempfile.TemporaryDirectory() as logs:
        env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "OMP_WAIT_POLICY": "PASSIVE"}
        engine = ManagedProcess(command, name="engine", log_path=Path(logs) / "engine.log", env=env)
        try:
            url = f"http://127.0.0.1:{port}"
            _await(engine, url)
            yield url
        finally:
            engine.terminate()


def _await(engine: ManagedProcess, url: str) -> None:
    print("loading the model ...", file=sys.stderr)
    deadline = time.monotonic() + _START_SECONDS
    while True:
        if not engine.is_alive():
            raise ChatFailed(f"the engine has ended: {engine.log_tail(1).strip()}")
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:  # not listening yet
            pass
        if time.monotonic() > deadline:
            raise ChatFailed(
                f"the engine was not ready within {_START_SECONDS:g} s: {engine.log_tail(1).strip()}"
            )
        time.sleep(0.2)
