import os
import time
from pathlib import Path

import pytest

from slime.processes.private import DirectoryNotOurs, private_directory, remove_older, write_private


def test_a_new_directory_is_this_users_alone_whatever_the_umask(tmp_path):
    previous = os.umask(0)
    try:
        assert private_directory(tmp_path / "logs").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(previous)


def test_one_that_is_open_to_others_is_closed(tmp_path):
    (tmp_path / "logs").mkdir(mode=0o755)
    assert private_directory(tmp_path / "logs").stat().st_mode & 0o777 == 0o700


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o755)
    (tmp_path / "logs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DirectoryNotOurs, match="logs: no directory of user"):
        private_directory(tmp_path / "logs")
    assert (tmp_path / "elsewhere").stat().st_mode & 0o777 == 0o755


def test_a_file_and_another_users_directory_are_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "theirs").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    for name in ("file", "theirs"):
        with pytest.raises(DirectoryNotOurs, match=name):
            private_directory(tmp_path / name)


def test_a_file_is_this_users_alone_also_in_the_place_of_one_that_is_not(tmp_path):
    path = tmp_path / "address"
    previous = os.umask(0)
    try:
        for text in ("first", "second"):
            write_private(path, text)
            assert path.stat().st_mode & 0o777 == 0o600 and path.read_text() == text
            path.chmod(0o644)
    finally:
        os.umask(previous)
    assert list(tmp_path.iterdir()) == [path]


def test_only_what_has_long_been_left_alone_is_removed(tmp_path):
    def aged(path: Path, days: float) -> None:
        when = time.time() - days * 86400
        os.utime(path, (when, when), follow_symlinks=False)

    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    for name in ("old", "old_but_written_to", "new"):
        (tmp_path / name / "01000000").mkdir(parents=True)
        (tmp_path / name / "01000000" / "engine_0.log").touch()
    (tmp_path / "link").symlink_to(kept)
    for path in ("old/01000000/engine_0.log", "old/01000000", "old"):
        aged(tmp_path / path, 31)
    for path in ("old_but_written_to/01000000", "old_but_written_to", "link"):
        aged(tmp_path / path, 31)
    remove_older(tmp_path, 30)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "new", "old_but_written_to"]
    assert (kept / "file").exists()
