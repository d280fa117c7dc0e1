"""A disk without room is the last line of a run that it ends."""

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from slime.config.run import run_config
from slime.observability.jsonl import JsonlWriter
from slime.ray import session
from slime.ray.ending import full_disks
from tests.run_args import run_args

Usage = namedtuple("Usage", "total used free")


def last_line(fail, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Returns that of a run which ``fail`` ends."""
    monkeypatch.setattr(session, "_session", lambda *arguments: fail())
    assert session._run(run_config(run_args()), lambda: None, lambda: None) == 1
    return capsys.readouterr().err.splitlines()[-1]


def test_metrics_that_cannot_be_written_name_the_file(monkeypatch, capsys) -> None:
    def fail() -> None:
        writer = JsonlWriter(Path("/dev/full"))
        try:
            writer.write("train", 0, {"train/loss": 0.5})
        finally:
            writer.close()

    assert last_line(fail, monkeypatch, capsys) == "error: [Errno 28] No space left on device: '/dev/full'"


def test_where_a_library_does_not_say_so_the_full_disk_is_named(monkeypatch, capsys, tmp_path) -> None:
    def fail() -> None:
        raise RuntimeError("unexpected pos 64 vs 0")

    room = {tmp_path: 0}
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(2**30, 0, room.get(place, 2**30)))
    save = str(tmp_path / "not" / "there")
    told = f"error: unexpected pos 64 vs 0 (no space is left on the disk of {save})"
    assert full_disks([None, save]) == told.removeprefix("error: unexpected pos 64 vs 0")
    monkeypatch.setattr(session, "_written_to", lambda args: [save])
    assert last_line(fail, monkeypatch, capsys) == told


def test_a_disk_with_room_is_not_named(tmp_path) -> None:
    assert full_disks([str(tmp_path)]) == ""
