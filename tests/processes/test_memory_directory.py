"""Directories in memory that go with their process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slime.processes.exclusive import DirectoryUnusable
from slime.processes.memory_directory import memory_directory, remove_abandoned

HOLDER = """
import sys, time
from pathlib import Path
from slime.processes.memory_directory import memory_directory

with memory_directory(Path(sys.argv[1]), "kept_", "--flag") as directory:
    print(directory, flush=True)
    sys.stdin.read()
"""


def test_it_is_empty_and_goes_with_the_context(tmp_path: Path) -> None:
    with memory_directory(tmp_path / "memory", "kept_", "--flag") as directory:
        assert [path.name for path in directory.iterdir()] == [".in_use"]
        assert directory.name.startswith(f"kept_{os.getpid()}_") and directory.stat().st_mode & 0o77 == 0
    assert not list((tmp_path / "memory").iterdir())


def test_what_a_dead_process_left_is_removed_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    (tmp_path / "kept_1_left").mkdir()
    (tmp_path / "kept_1_left" / ".in_use").write_text("1")
    (tmp_path / "kept_2_left.new").mkdir()
    (tmp_path / "of_others").mkdir()
    with (
        memory_directory(tmp_path, "kept_", "--flag") as first,
        memory_directory(tmp_path, "kept_", "--flag"),
    ):
        assert first.is_dir()
        assert len(list(tmp_path.glob("kept_*"))) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["of_others"]


def test_nothing_is_opened_in_the_directory_of_another_user(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "kept_1_left").mkdir()
    (tmp_path / "kept_1_left" / ".in_use").write_text("1")
    opened: list[Path] = []
    monkeypatch.setattr(Path, "open", lambda path, *mode: opened.append(path))
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    remove_abandoned(tmp_path, "kept_")
    assert (tmp_path / "kept_1_left").is_dir() and not opened


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    unusable = pytest.raises(DirectoryUnusable, match="--flag: cannot be written to")
    with unusable, memory_directory(tmp_path / "file", "kept_", "--flag"):
        pass


@pytest.mark.slow
def test_it_goes_with_a_process_that_is_killed(tmp_path: Path) -> None:
    """And with all that others of its run write there meanwhile."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        directory = Path(holder.stdout.readline().strip())
        (directory / "actor").mkdir()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    deadline = time.monotonic() + 300
    while directory.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    directory.mkdir()
    while directory.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
