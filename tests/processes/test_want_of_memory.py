"""A process that the kernel really kills for want of memory is said to have been: the kernel's log has it."""

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from slime.config.run import run_config
from slime.processes import forked
from slime.processes.child import ManagedProcess
from slime.processes.forked import ForkedProcess, ForkServer
from slime.processes.supervisor import KERNEL_LOG, killed_for_memory
from slime.ray import session
from slime.ray.fate import known_end
from tests.run_args import run_args
from tests.scarcity import MemoryGroup, memory_group

HUNGRY = """
import os, sys
open(sys.argv[1], "w").write(str(os.getpid()))
print("loading a large model", flush=True)
held = [bytearray(1 << 20) for _ in range(1 << 10)]
"""
KILLED = "out of memory: Killed process"


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    with memory_group(f"slime-test-{os.getpid()}", 24 << 20) as group:
        yield group


@pytest.fixture
def hungry(tmp_path: Path) -> Path:
    script = tmp_path / "hungry.py"
    script.write_text(HUNGRY)
    return script


def log_can_be_read() -> bool:
    try:
        os.close(os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def test_the_last_line_of_a_run_whose_engine_the_kernel_kills_says_so(
    group, hungry, monkeypatch, capsys
) -> None:
    def fail() -> None:
        command = [sys.executable, str(hungry), str(group.processes)]
        engine = ManagedProcess(command, name="engine 0", log_path=hungry.parent / "log")
        engine.wait(120)
        raise RuntimeError(engine.exit_reason())

    monkeypatch.setattr(session, "_session", lambda *arguments: fail())
    assert session._run(run_config(run_args()), lambda: None, lambda: None) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: engine 0: killed by SIGKILL: ")
    assert not log_can_be_read() or ("the kernel says: " in last and KILLED in last)


def test_a_rank_that_the_kernel_kills_is_said_to_have_been(group, hungry, monkeypatch) -> None:
    with closing(ForkServer()) as server, open(os.devnull, "r+b") as nothing:
        monkeypatch.setenv(forked.VARIABLE, server.address)
        server.preload([])  # waits for it
        words = [str(hungry), str(group.processes)]
        rank = ForkedProcess(server.address, words, files=(nothing.fileno(),) * 3)
        assert rank.wait(120) == -9
        end = known_end(rank.pid)
    assert end.startswith("was killed by SIGKILL")
    assert not log_can_be_read() or (f"{KILLED} {rank.pid} (" in end and "somebody" not in end)


def test_nobody_else_is_said_to_have_been_killed(monkeypatch) -> None:
    assert killed_for_memory(os.getpid()) is None
    monkeypatch.setattr("slime.processes.supervisor.KERNEL_LOG", "/no/such/log")
    assert killed_for_memory(1) is None
