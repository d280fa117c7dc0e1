"""Directories in memory that go with their process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slime.processes import reaper
from slime.processes.abandoned import remove_abandoned
from slime.processes.exclusive import DirectoryUnusable
from slime.processes.memory_directory import memory_directory

OURS = f"kept_{Path('/proc/sys/kernel/random/boot_id').read_text()[:8]}_"
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
        assert directory.name.startswith(f"{OURS}{os.getpid()}_") and directory.stat().st_mode & 0o77 == 0
    assert not list((tmp_path / "memory").iterdir())


def test_what_a_dead_process_left_is_removed_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    """Nor is what another machine has in a directory that both see, or who only gave it such a name."""
    (tmp_path / f"{OURS}1_left").mkdir()
    (tmp_path / f"{OURS}1_left" / ".in_use").write_text("1")
    (tmp_path / f"{OURS}2_left.new").mkdir()
    os.utime(tmp_path / f"{OURS}2_left.new", (0, 0))
    others = ["kept_00000000_1_left", "kept_by_hand", f"{OURS}3_begun.new"]
    for name in others:
        (tmp_path / name).mkdir()
    with (
        memory_directory(tmp_path, "kept_", "--flag") as first,
        memory_directory(tmp_path, "kept_", "--flag", "rank_") as second,
    ):
        assert first.is_dir() and second.name.startswith(f"{OURS}rank_{os.getpid()}_")
        there = sorted(path.name for path in tmp_path.iterdir())
        assert there == sorted([*others, first.name, second.name])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def test_nothing_is_opened_in_the_directory_of_another_user(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / f"{OURS}1_left").mkdir()
    (tmp_path / f"{OURS}1_left" / ".in_use").write_text("1")
    opened: list[Path] = []
    open_ = Path.open
    monkeypatch.setattr(
        Path, "open", lambda path, *how, **more: opened.append(path) or open_(path, *how, **more)
    )
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    remove_abandoned(tmp_path, "kept_")
    assert (tmp_path / f"{OURS}1_left").is_dir() and not [one for one in opened if tmp_path in one.parents]


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    unusable = pytest.raises(DirectoryUnusable, match="--flag: cannot be written to")
    with unusable, memory_directory(tmp_path / "file", "kept_", "--flag"):
        pass


def test_one_that_cannot_be_removed_is_given_up(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(reaper, "_LONGEST_S", 0.3)
    monkeypatch.setattr(reaper.shutil, "rmtree", lambda path, ignore_errors: None)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    reaper.remove_after(ended.pid, str(tmp_path))


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
