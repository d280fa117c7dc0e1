"""Ranks that write their parts of a snapshot into directories of their own go on from all parts together."""

import pytest

from slime.arguments.core.run_args import copied
from slime.ray import snapshot_holder
from slime.ray.train_worker import TrainWorker
from tests.backends.fsdp_harness import fsdp_args
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.ray.hosts import Host
from tests.trainer_batches import random_rollout, split, trainer_args, unrecorded

pytestmark = pytest.mark.slow

MOVING = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 1}


def _run(rank, args, rollouts, places, saves):
    """Trains on ``rollouts``, after the first of which it saves, or from what was saved."""
    worker = TrainWorker(args if saves else copied(args, load=f"{places[rank]}/actor", ckpt_step=0))
    start, steps = worker.start(), []
    for rollout_id in range(start, len(rollouts)):
        shard = split(args, rollouts[rollout_id], worker.parallel_config())
        steps += worker.train_shard(rollout_id, shard)[0].get("train", [])
        if saves and rollout_id == 0:
            assert worker.save_model(0, False, 1, f"{places[rank]}/actor") == [None]
    return start, steps


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_ranks_with_a_directory_each_go_on_bit_for_bit(tmp_path, monkeypatch, backend: str) -> None:
    """Beside the weights there is a version of them, in a directory that the first rank alone makes."""
    monkeypatch.setattr(snapshot_holder, "wait_one", lambda ref, what, timeout: ref())
    make = fsdp_args if backend == "fsdp" else trainer_args
    args = make(save_tiny_hf(tmp_path / "hf", "qwen3"), num_rollout=3, **MOVING)
    rollouts = [random_rollout(vocab_size=256, seed=seed) for seed in range(3)]
    hosts = [Host(), Host()]
    for number, host in enumerate(hosts):
        host.holder.open(str(tmp_path), f"1a_{number}_", 0)
        host.holder.prepare("actor", 0)
    places = [str(host.place) for host in hosts]
    through = run_ranks(_run, 2, args, rollouts, places, True)
    for number, host in enumerate(hosts):
        host.holder.publish("actor", 0)
        assert host.ranks(0) == [number]
    for number, host in enumerate(hosts):
        host.holder.copy_parts("actor", 0, hosts[1 - number], [1 - number], True)
        host.holder.mark("actor", 0)
        assert host.ranks(0) == [0, 1] and not unrecorded(host.place / "actor" / "iter_0000000")
    resumed = run_ranks(_run, 2, args, rollouts, places, False)
    for (_, steps), (start, later) in zip(through, resumed, strict=True):
        assert start == 1 and later == steps[1:]
