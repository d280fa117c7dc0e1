"""A disk without room is the last line of a run that it ends."""

import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import save

from slime.config.run import run_config
from slime.observability.jsonl import JsonlWriter
from slime.ray import session
from slime.ray.ending import full_disks
from slime.training.checkpoint_errors import explained
from tests.run_args import run_args
from tests.scarcity import small_disk

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
    place = str(tmp_path / "not" / "there")
    told = f"error: unexpected pos 64 vs 0 (no space is left on the disk of {place})"
    assert full_disks([None, place]) == told.removeprefix("error: unexpected pos 64 vs 0")
    monkeypatch.setattr(session, "_written_to", lambda args: [place])
    assert last_line(fail, monkeypatch, capsys) == told


def test_a_disk_with_room_is_not_named(tmp_path) -> None:
    assert full_disks([str(tmp_path)]) == ""


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_checkpoint_for_which_a_disk_has_no_room_names_it(group, monkeypatch, capsys, tmp_path) -> None:
    """A real disk, and what writes checkpoints of both trainers; a whole run is in tests/e2e."""

    def fail() -> None:
        with explained(disk, "written", "space there, and leave to write"):
            save({"weight": torch.zeros(1 << 18)}, checkpoint_id=disk / "iter_0000001")

    with small_disk(tmp_path / "disk", "64k") as disk:
        monkeypatch.setattr(session, "_written_to", lambda config: [str(disk)])
        told = last_line(fail, monkeypatch, capsys)
    assert told.startswith(f"error: checkpoint {disk} could not be written: rank 0: ")
    assert "as on a full disk" in told and told.endswith(f" (no space is left on the disk of {disk})")
