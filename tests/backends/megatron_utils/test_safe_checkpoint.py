"""A checkpoint that somebody planted is refused and runs nothing."""

import importlib
import io
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from slime.ray.train_worker import TrainWorker
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import trainer_args

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def trainer_is_loaded():
    """Loads the trainer and calls nothing: whoever loads megatron-core's reader gets the safe one."""
    importlib.import_module("slime.backends.megatron_utils.checkpoint")
    importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")


class Planted:
    """Makes a file where it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self):
        return open, (str(self.proof), "w")


def _save(rank, args):
    worker = TrainWorker(args)
    worker.start()
    worker.save_model(0, force_sync=True)


def _load(rank, args):
    TrainWorker(args).start()


@pytest.mark.parametrize("flag", ["load", "ref_load"])
def test_code_in_the_metadata_of_a_checkpoint_does_not_run(tmp_path, flag):
    hf, proof = save_tiny_hf(tmp_path / "hf", "qwen3"), tmp_path / "proof"
    saved = tmp_path / "saved"
    run_ranks(_save, 1, trainer_args(hf, save=str(saved), no_save_optim=True))
    (saved / "iter_0000000" / ".metadata").write_bytes(pickle.dumps(Planted(proof)))
    with pytest.raises(RuntimeError, match=r"\.metadata: not a checkpoint's metadata .*open"):
        run_ranks(_load, 1, trainer_args(hf, use_kl_loss=True, finetune=True, **{flag: str(saved)}))
    assert not proof.exists()


def test_code_in_the_objects_of_a_checkpoint_does_not_run(tmp_path):
    buffer = io.BytesIO()
    torch.save(Planted(tmp_path / "proof"), buffer)
    buffer.seek(0)
    planner = DefaultLoadPlanner()
    planner.set_up_planner({"rng": None}, Metadata({}), True)
    place = MetadataIndex("rng")
    item = ReadItem(LoadItemType.BYTE_IO, place, torch.Size([]), place, torch.Size([]), torch.Size([]))
    with pytest.raises(pickle.UnpicklingError, match="open"):
        planner.load_bytes(item, buffer)
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"cposix\nsystem\n(S'true'\ntR.",
        b"cbuiltins\ngetattr\n(S'a'\nS'upper'\ntR.",
        # BUILD on the class itself: would hold for every checkpoint that the process reads afterwards.
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n}S'planted'\nI1\nsb.",
        b"not a pickle",
        b"",
    ],
)
def test_what_no_metadata_holds_is_refused(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match="not a checkpoint's metadata"):
        FileSystemReader(tmp_path).read_metadata()
    assert not hasattr(Metadata, "planted")
