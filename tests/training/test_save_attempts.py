"""A disk that is full at any point of a save costs that save alone, on every rank, and leaves nothing."""

import os
import subprocess
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch.distributed as dist

from slime.ray.train_worker import TrainWorker
from slime.training.checkpoint_dir import MARKER, find_checkpoint
from slime.utils.checkpoint_record import damage
from tests.backends.fsdp_harness import fsdp_args
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.scarcity import small_disk
from tests.trainer_batches import trainer_args

pytestmark = pytest.mark.slow

ROOM, PAGE = "64m", 4096
SMALL_FILES = 5  # pages: what ranks write after their shards, and its index
TRAINERS = {"megatron": trainer_args, "fsdp": fsdp_args}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3")


def _resize(disk, size):
    _remount(disk, f"size={size}")


def _remount(disk, limit):
    if dist.get_rank() == 0:
        subprocess.run(["mount", "-o", f"remount,{limit}", disk], check=True)
    dist.barrier()


def _used(disk):
    return sum(file.stat().st_blocks * 512 for file in Path(disk).rglob("*") if file.is_file())


def _rooms(whole):
    """Room for nothing but the first file, for half of a checkpoint, and for all but its last pages."""
    half = whole // 2 // PAGE * PAGE
    return [PAGE, half, *(whole - PAGE * pages for pages in range(SMALL_FILES, 0, -1))]


def _fill_at_every_point(rank, args, disk):
    """Saves without room at several points, then with enough; what is left after each."""
    worker = TrainWorker(args)
    worker.start()
    outcomes = worker.save_model(0, force_sync=True)
    whole, left = _used(disk), []
    for room in _rooms(whole):
        _resize(disk, whole + room)  # beside the first checkpoint, which stays
        outcomes += worker.save_model(1, force_sync=True)
        left.append(sorted(path.name for path in Path(disk, "saved").iterdir()))
        dist.barrier()
    _resize(disk, ROOM)
    outcomes += worker.save_model(2, force_sync=True)
    return {"outcomes": outcomes, "left": left}


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_full_disk_fails_the_save_on_every_rank_and_the_next_one_is_whole(
    model, tmp_path, trainer, background
):
    with small_disk(tmp_path / "disk", ROOM) as disk:
        args = TRAINERS[trainer](model, save=str(disk / "saved"), async_save=background)
        first, second = run_ranks(_fill_at_every_point, 2, args, str(disk))
        assert first["outcomes"] == second["outcomes"]
        assert first["outcomes"][0] is None and first["outcomes"][-1] is None
        failures = first["outcomes"][1:-1]
        assert len(failures) == 2 + SMALL_FILES and all(
            "could not be written: rank " in told for told in failures
        )
        assert all(before == after for before, after in pairwise(first["left"])), (
            "a failed save left something"
        )
        iteration, path = find_checkpoint(disk / "saved")
        assert iteration == 2 and not list(damage(path, checksums=True))
        assert {MARKER, "iter_0000000", "iter_0000002"} <= {
            entry.name for entry in (disk / "saved").iterdir()
        }


def _export_without_room(rank, args, disk):
    worker = TrainWorker(args)
    worker.start()
    outcomes = worker.save_model(0)
    whole, left = _used(disk), []
    for room in (PAGE, whole // 2 // PAGE * PAGE, whole - PAGE):
        _resize(disk, whole + room)
        outcomes += worker.save_model(1)
        left.append(sorted(path.name for path in Path(disk).iterdir()))
        dist.barrier()
    _resize(disk, ROOM)
    return {"outcomes": outcomes + worker.save_model(2), "left": left}


def _names(disk):
    found = os.statvfs(disk)
    return found.f_files - found.f_ffree


def _without_names(rank, args, disk):
    """Saves where the disk takes so many files and directories more, from none to one too few."""
    worker = TrainWorker(args)
    worker.start()
    empty = _names(disk)
    dist.barrier()
    outcomes = worker.save_model(0, force_sync=True)
    whole, left = _names(disk), []
    dist.barrier()
    own = whole - empty - 2  # but `saved` and the marker, which has another name at first
    for more in range(own + 1):
        _remount(disk, f"nr_inodes={whole + more}")
        outcomes += worker.save_model(1, force_sync=True)
        left.append(sorted(path.name for path in Path(disk, "saved").iterdir()))
        dist.barrier()
    _remount(disk, f"nr_inodes={whole + own + 1}")
    return {"outcomes": outcomes + worker.save_model(2, force_sync=True), "left": left}


def test_a_disk_without_room_for_any_one_file_or_directory_fails_the_save_on_every_rank(model, tmp_path):
    """With FSDP, where torch would make directories while it plans."""
    with small_disk(tmp_path / "disk", ROOM) as disk:
        args = fsdp_args(model, save=str(disk / "saved"), async_save=True)
        first, second = run_ranks(_without_names, 2, args, str(disk))
        assert first["outcomes"] == second["outcomes"]
        whole, *failures, last = first["outcomes"]
        assert whole is last is None and len(failures) > 10
        assert all("could not be written: rank " in told for told in failures)
        assert first["left"] == [["iter_0000000", MARKER]] * len(failures)


EXPORTS = {"weights": fsdp_args, "adapters": partial(trainer_args, lora_rank=4)}


@pytest.mark.parametrize("export", EXPORTS)
def test_a_full_disk_fails_an_export_on_every_rank_and_the_next_one_is_whole(model, tmp_path, export):
    with small_disk(tmp_path / "disk", ROOM) as disk:
        args = EXPORTS[export](model, save_hf=str(disk / "hf{rollout_id}"))
        first, second = run_ranks(_export_without_room, 2, args, str(disk))
        assert first["outcomes"] == second["outcomes"]
        whole, *failures, last = first["outcomes"]
        assert whole is last is None
        assert len(failures) == 3 and all("hf1 could not be written: rank 0: " in told for told in failures)
        assert first["left"] == [["hf0"]] * 3
        files = {file.name for file in (disk / "hf0").iterdir()}
        assert {file.name for file in (disk / "hf2").iterdir()} == files
