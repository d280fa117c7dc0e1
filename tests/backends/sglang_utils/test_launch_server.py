"""SGLang's processes find no megatron-core, the main one and those it spawns."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime.processes.secret_options import hide_options

_SERVER = """
import multiprocessing, sys
from sglang.worker import report

if __name__ == "__main__":
    report("server", sys.argv[1:])
    child = multiprocessing.get_context("spawn").Process(target=report, args=("worker", []))
    child.start()
    child.join()
"""
_WORKER = """
def report(who, arguments):
    try:
        import megatron.core
        print(who, arguments, "finds megatron", flush=True)
    except ImportError:
        print(who, arguments, "finds no megatron", flush=True)
"""


@pytest.mark.parametrize("options", [[], ["--api-key=K"]], ids=["plain", "with a secret"])
def test_no_process_of_the_server_finds_megatron(tmp_path: Path, options: list[str]) -> None:
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(_SERVER)
    (package / "worker.py").write_text(_WORKER)
    argv, secrets = hide_options(
        [sys.executable, "-m", "slime.backends.sglang_utils.launch_server", "--port=1", *options]
    )
    environment = {**os.environ, **secrets, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"server {['--port=1', *options]} finds no megatron",
        "worker [] finds no megatron",
    ]
