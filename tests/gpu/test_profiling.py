"""Profiles, memory and MFU of a trainer on one GPU."""

import gzip
import json
import pickle

import pytest
import torch

from slime.ray.train_worker import TrainWorker
from slime.utils.accelerator import take_peak_memory
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import random_rollout, split, trainer_args

pytestmark = pytest.mark.gpu


def _train(rank, args):
    worker = TrainWorker(args)
    worker.start()
    batch = split(args, random_rollout(256), worker.parallel_config())
    return [worker.train_shard(rollout_id, batch)[0]["perf"] for rollout_id in range(2)]


def test_a_step_leaves_its_kernels_its_allocations_and_its_peak(tmp_path):
    path = save_tiny_hf(tmp_path / "hf", "llama", hidden_size=512, intermediate_size=2048)
    args = trainer_args(
        path,
        use_pytorch_profiler=True,
        profile_step_start=1,
        profile_step_end=2,
        tensorboard_dir=str(tmp_path / "profile"),
        record_memory_history=True,
        memory_snapshot_num_steps=2,
        memory_snapshot_dir=str(tmp_path / "memory"),
    )
    ((first, second),) = run_ranks(_train, 1, args)
    for perf in (first, second):
        assert 0 < perf["perf/memory_allocated_gib"] <= perf["perf/memory_reserved_gib"]
    (trace,) = (tmp_path / "profile").iterdir()
    with gzip.open(trace) as file:
        assert any(event.get("cat") == "kernel" for event in json.load(file)["traceEvents"])
    (snapshot,) = (tmp_path / "memory").iterdir()
    traces = pickle.loads(snapshot.read_bytes())["device_traces"]  # noqa: S301  # of this test
    assert any(
        entry["action"] == "alloc" and entry["frames"] for entry in traces[torch.cuda.current_device()]
    )


def test_the_peak_of_memory_is_that_since_it_was_last_taken():
    device = torch.device("cuda", 0)
    take_peak_memory(device)
    large = torch.empty(2**28, dtype=torch.uint8, device=device)
    first = take_peak_memory(device)
    del large
    assert first.reserved >= first.allocated >= 2**28
    take_peak_memory(device)
    assert take_peak_memory(device).allocated < first.allocated
