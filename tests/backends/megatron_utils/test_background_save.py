"""A process that writes in the background and is killed or stopped fails the save on every rank, by name."""

import os
import shutil
import signal
import threading

import pytest

from slime.arguments.validate.checkpoint_files import newest_whole
from slime.backends.megatron_utils import background_save, checkpoint_processes
from slime.processes.stopped import StopClock
from slime.ray.train_worker import TrainWorker
from slime.training.checkpoint_dir import MARKER, iteration_dir
from slime.utils import checkpoint_record
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import trainer_args

pytestmark = pytest.mark.slow

STOPPED, KILLED = "was stopped (SIGSTOP) for 6 s, and killed", "was killed by SIGKILL"
WHOLE = (3, 4)  # the saves after those
HELD = 5  # and one whose checksums take long


def _polled(worker):
    """What becomes of a save that nobody waits for; the ranks ask as often."""
    outcomes = []
    while not outcomes:
        worker.backend.poll()
        outcomes = worker.backend._writers.checkpoints.attempts.take()
    return outcomes


def _save(rank, args):
    checkpoint_processes._LOOK_S = 0.01
    StopClock.overdue.__defaults__ = (0.05,)
    worker = TrainWorker(args)
    worker.start()
    put, outcomes = background_save._Sender.put, []
    for number, ended_by in enumerate((signal.SIGSTOP, signal.SIGKILL, signal.SIGSTOP)):
        if rank == 1:
            background_save._Sender.put = lambda *_, by=ended_by: os.kill(os.getpid(), by)
        outcomes += worker.save_model(number, force_sync=number == 0) or _polled(worker)
    background_save._Sender.put = put
    for number in WHOLE:
        outcomes += worker.save_model(number, force_sync=True)
    return {"outcomes": outcomes, "held": _held(rank, worker, args.save), "left": os.listdir(args.save)}


def _held(rank, worker, root):
    """A save of the background, copied while its checksums are taken: what a kill would leave."""
    begun, go_on, threads = threading.Event(), threading.Event(), set()
    checksum = checkpoint_record._checksum

    def slow(path):
        if path.suffix == ".distcp":
            threads.add(threading.current_thread().name)
            begun.set()
            assert go_on.wait(300)
        return checksum(path)

    checkpoint_record._checksum = slow
    meanwhile = worker.save_model(HELD)
    assert begun.wait(300)
    for _ in range(5):  # the ranks ask as often
        worker.backend.poll()
        meanwhile += worker.backend._writers.checkpoints.attempts.take()
    if rank == 0:
        shutil.copytree(root, f"{root}_killed")
    worker.backend.poll()  # no rank goes on before that is done
    go_on.set()
    return {"meanwhile": meanwhile, "outcomes": _polled(worker), "threads": threads}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("background")
    args = trainer_args(save_tiny_hf(root / "hf", "qwen3"), save=str(root / "saved"), async_save=True)
    return root / "saved", run_ranks(_save, 2, args)


def test_one_that_is_killed_or_stays_stopped_fails_the_save_by_name(saved):
    root, (first, second) = saved
    assert first["outcomes"] == second["outcomes"]
    *failures, whole, last = first["outcomes"]
    for number, (told, end) in enumerate(zip(failures, (STOPPED, KILLED, STOPPED), strict=True)):
        path = iteration_dir(root, number).with_suffix(".tmp")
        assert f"could not be written: rank 1: RuntimeError: Worker failure: {path}: the process that" in told
        assert f"wrote it {end} " in told
    assert whole is last is None
    names = [iteration_dir("", i).name for i in (*WHOLE, HELD)]
    assert sorted(path.name for path in root.glob("iter_*")) == names


def test_training_waits_for_no_checksum_and_none_is_missing_of_the_latest(saved):
    root, ranks = saved
    for rank in ranks:
        held = rank["held"]
        assert held == {"meanwhile": [], "outcomes": [None], "threads": {"background save"}}
    killed = root.with_name(f"{root.name}_killed")
    assert (killed / MARKER).read_text() == str(WHOLE[-1])
    assert newest_whole(killed, "checksums") == (WHOLE[-1], [])
    assert iteration_dir(killed, HELD).with_suffix(".tmp").is_dir()
    assert (root / MARKER).read_text() == str(HELD)


def test_a_damaged_save_of_the_background_is_skipped_by_name(saved):
    root, _ = saved
    older, newest = WHOLE[-1], HELD
    assert newest_whole(root, "checksums") == (newest, [])
    shard = next(iteration_dir(root, newest).glob("__1_*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    why = f"iter_{newest:07d}: {shard.name} has other content than was written"
    assert newest_whole(root, "checksums") == (older, [why])
