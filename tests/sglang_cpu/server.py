"""SGLang's own server on the CPU, for runs that are given engines."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.engines import free_port

STARTUP_TIMEOUT_S = 600
_FLAGS = [
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend"),
    *("pytorch", "--disable-overlap-schedule", "--sleep-on-idle", "--disable-cuda-graph"),
    *("--mem-fraction-static", "0.9", "--max-total-tokens", "16384"),
]
_ENVIRONMENT = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false"}
"""Ranks on a CPU see the memory that others leave, which changes while they start."""


@contextmanager
def sglang_server(model: Path, log: Path, *flags: object) -> Iterator[str]:
    """The address of a server of this checkpoint; it ends with the block."""
    port = free_port()
    where = ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command = [sys.executable, "-m", "sglang.launch_server", *where, *_FLAGS, *map(str, flags)]
    with log.open("w") as output:
        server = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | _ENVIRONMENT,
        )
    try:
        _wait_ready(server, f"http://127.0.0.1:{port}", log)
        yield f"127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _wait_ready(server: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + STARTUP_TIMEOUT_S
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=60, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.5)
