"""A full disk and a damaged shard are named in the first line of the error."""

import resource

import pytest

from slime.ray.session import cause
from slime.ray.train_worker import TrainWorker
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import trainer_args

pytestmark = pytest.mark.slow


def _first_line(action):
    try:
        action()
    except RuntimeError as error:
        return cause(error)


def _save(rank, args, limit):
    worker = TrainWorker(args)
    worker.start()
    if limit:  # bytes of a file, as a disk that fills up in the middle of it
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return worker.save_model(0, force_sync=True)


def _load(rank, args):
    return _first_line(lambda: TrainWorker(args).start())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3")


@pytest.mark.parametrize("extra", [{}, {"async_save": True}], ids=["at once", "in the background"])
def test_a_full_disk_is_named_when_a_checkpoint_is_written(model, tmp_path, extra):
    args = trainer_args(model, save=str(tmp_path / "saved"), no_save_optim=True, **extra)
    for (line,) in run_ranks(_save, 2, args, 100_000):
        assert f"checkpoint {tmp_path}/saved could not be written: rank " in line
        assert "File too large" in line or "as on a full disk" in line


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_damaged_shard_is_named_when_a_checkpoint_is_read(model, tmp_path, world_size):
    saved = tmp_path / "saved"
    run_ranks(_save, world_size, trainer_args(model, save=str(saved), no_save_optim=True), 0)
    for shard in saved.glob("iter_*/*.distcp"):
        shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    for line in run_ranks(_load, world_size, trainer_args(model, load=str(saved), finetune=True)):
        assert f"checkpoint {saved}/iter_0000000 could not be read: rank 0: " in line
        assert "EOFError" in line or "corrupted" in line
