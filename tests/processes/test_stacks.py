"""What a process that hangs is in."""

import subprocess
import sys

import pytest

from slime.processes import stacks as module
from slime.processes.stacks import stacks

HANGS = """
import sys, threading
def waits_for_its_peers():
    print("there", flush=True)
    threading.Event().wait(600)
waits_for_its_peers()
"""


def test_the_call_that_hangs_is_named() -> None:
    process = subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "there\n"
        found = stacks(process.pid)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    if found.startswith("py-spy"):
        pytest.skip(found)
    assert "waits_for_its_peers" in found


def test_why_there_are_none_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    assert stacks(2**22 + 1).startswith("py-spy")
    monkeypatch.setattr(module.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    assert stacks(1) == "py-spy is not installed"
