"""Resuming equals never having stopped, on other ranks too; half a checkpoint is never chosen."""

import json
import os
import pickle
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from slime.backends.fsdp_utils import checkpoint as checkpoint_module
from slime.ray.session import cause
from slime.ray.train_worker import TrainWorker
from slime.training.checkpoint_dir import MARKER, find_checkpoint, iteration_dir
from slime.utils.checkpoint_record import damage
from tests.backends.fsdp_harness import fsdp_args, weights_of
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import random_rollout, split, unrecorded

pytestmark = pytest.mark.slow

FLAGS = {"num_rollout": 4, "lr_decay_style": "linear", "force_sync": True}
SGD = {"optimizer": "sgd", "sgd_momentum": 0.8}
MOVING = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 1}
# Of some layers, beside a reference that moves.
ADAPTERS = {
    **{"lora_rank": 4, "lora_exclude_modules": [r".*layers\.1\..*"], "lora_dropout": 0.1},
    **MOVING,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3")


@pytest.fixture(scope="module")
def rollouts():
    return {i: random_rollout(vocab_size=256, seed=i) for i in range(4)}


def _drawn():
    return [random.random(), float(np.random.rand()), torch.rand(()).item()]


def _run(rank, args, rollouts, save_after):
    """Trains on ``rollouts`` from where ``args.load`` says; saves after one of them."""
    worker = TrainWorker(args)
    start = worker.start()
    steps, drawn = [], []
    for rollout_id in range(start, max(rollouts) + 1):
        drawn += _drawn()
        shard = split(args, rollouts[rollout_id], worker.parallel_config())
        steps += worker.train_shard(rollout_id, shard)[0].get("train", [])
        if rollout_id == save_after:
            worker._weight_version = 5
            worker.save_model(rollout_id, args.force_sync, trained_steps=9)
    worker.backend._writers.checkpoints.finish()
    told = {"version": worker._weight_version, "trained_steps": worker.trained_steps()}
    return {"start": start, "steps": steps, "weights": weights_of(worker), "drawn": drawn, **told}


@pytest.mark.parametrize(
    ("world_size", "extra"),
    [(1, {}), (2, MOVING), (2, {"async_save": True, "force_sync": False}), (1, SGD), (2, ADAPTERS)],
    ids=["1 rank", "2 ranks, moving reference", "async save", "SGD", "2 ranks, adapters"],
)
def test_resume_is_bit_exact(checkpoint, rollouts, tmp_path, world_size, extra):
    args = fsdp_args(checkpoint, save=str(tmp_path), load=str(tmp_path), **{**FLAGS, **extra})
    through = run_ranks(_run, world_size, args, rollouts, 1)
    assert (tmp_path / MARKER).read_text() == "1"
    assert not list(tmp_path.glob("*.tmp"))
    assert not unrecorded(iteration_dir(tmp_path, 1))
    assert not list(damage(iteration_dir(tmp_path, 1), checksums=True))
    resumed = run_ranks(_run, world_size, args, rollouts, -1)
    for before, after in zip(through, resumed, strict=True):
        assert (after["start"], after["version"]) == (2, 5)
        assert (before["trained_steps"], after["trained_steps"]) == (None, 9)
        assert after["steps"] == before["steps"][2:]
        assert after["drawn"] == before["drawn"][6:]
        for name, weight in before["weights"].items():
            assert torch.equal(weight, after["weights"][name]), name


def test_a_checkpoint_of_two_ranks_loads_at_one_and_back(checkpoint, rollouts, tmp_path):
    args = fsdp_args(checkpoint, save=str(tmp_path), load=str(tmp_path), **FLAGS)
    through = run_ranks(_run, 2, args, rollouts, 1)[0]
    for world_size in (1, 2):
        resumed = run_ranks(_run, world_size, args, rollouts, -1)[0]
        first, *later = resumed["steps"]
        assert first == pytest.approx(through["steps"][2], rel=1e-5, abs=1e-8)
        assert later == [pytest.approx(step, rel=1e-3, abs=1e-6) for step in through["steps"][3:]]
        for name, weight in through["weights"].items():
            torch.testing.assert_close(resumed["weights"][name], weight, rtol=0, atol=1e-4)


def test_a_checkpoint_of_adapters_holds_nothing_else_and_is_for_no_others(checkpoint, rollouts, tmp_path):
    whole, saved = str(tmp_path / "whole"), str(tmp_path / "saved")
    flags = {**FLAGS, **ADAPTERS, "lora_dropout": 0.0}
    through = run_ranks(_run, 2, fsdp_args(checkpoint, save=saved, **flags), rollouts, 1)[0]
    directory = find_checkpoint(saved)[1]
    for part in ("model", "optimizer", "ref"):
        held = dcp.FileSystemReader(directory / part).read_metadata().state_dict_metadata
        assert held and all(".adapters.lora_" in name for name in held)
    # A model and its moments have 2.1 MB.
    assert sum(file.stat().st_size for file in directory.rglob("*")) < 1_000_000
    (resumed,) = run_ranks(_run, 1, fsdp_args(checkpoint, load=saved, **flags), rollouts, -1)
    assert resumed["steps"][0] == pytest.approx(through["steps"][2], rel=1e-5, abs=1e-8)
    for name, weight in through["weights"].items():
        torch.testing.assert_close(resumed["weights"][name], weight, rtol=0, atol=1e-4)
    run_ranks(_run, 1, fsdp_args(checkpoint, save=whole, **FLAGS), {0: rollouts[0]}, 0)
    for changes, message in (
        ({"load": saved, "lora_rank": 8}, "was made with --lora-rank 4 (wanted: it, not 8)"),
        ({"load": saved, "lora_alpha": 8.0}, "was made with --lora-alpha 32.0 (wanted: it, not 8.0)"),
        ({"load": saved, "lora_exclude_modules": []}, "was made with --lora-exclude-modules ['.*layers"),
        ({"load": saved, "lora_rank": 0}, "holds adapters alone (wanted: --lora-rank 4)"),
        ({"load": whole}, "holds all weights and no adapters (wanted: no --lora-rank, or it as --ref-load"),
        ({"ref_load": saved}, "holds adapters alone (wanted: one of all weights)"),
    ):
        (answer,) = run_ranks(_start, 1, fsdp_args(checkpoint, **{**flags, **changes}))
        assert message in str(answer)


def test_the_base_of_adapters_comes_from_a_checkpoint_again_when_a_run_goes_on(
    checkpoint, rollouts, tmp_path
):
    (whole,) = run_ranks(
        _run, 1, fsdp_args(checkpoint, save=str(tmp_path / "a"), **FLAGS), {0: rollouts[0]}, 0
    )
    flags = {**FLAGS, "lora_rank": 4, "ref_load": str(tmp_path / "a"), "save": str(tmp_path / "b")}
    args = fsdp_args(checkpoint, load=str(tmp_path / "b"), **flags)
    (begun,) = run_ranks(_weights_at_start, 1, args)
    assert begun["start"] == 0
    assert all(torch.equal(weight, begun["weights"][name]) for name, weight in whole["weights"].items())
    (through,) = run_ranks(_run, 1, args, {0: rollouts[0]}, 0)
    (resumed,) = run_ranks(_weights_at_start, 1, args)
    assert resumed["start"] == 1
    assert all(torch.equal(weight, resumed["weights"][name]) for name, weight in through["weights"].items())


def test_only_the_weights_are_loaded_where_that_is_asked_for(checkpoint, rollouts, tmp_path):
    flags = {**FLAGS, "save": str(tmp_path / "saved"), "no_save_optim": True}
    (saved,) = run_ranks(_run, 1, fsdp_args(checkpoint, **flags), {0: rollouts[0]}, 0)
    place = str(tmp_path / "saved")
    with pytest.raises(RuntimeError, match="no optimizer state: wanted --no-load-optim"):
        run_ranks(_run, 1, fsdp_args(checkpoint, load=place, **FLAGS), {}, -1)
    for flags, start in (({"no_load_optim": True}, 1), ({"finetune": True}, 0)):
        args = fsdp_args(checkpoint, load=place, **FLAGS, **flags)
        (loaded,) = run_ranks(_weights_at_start, 1, args)
        assert loaded["start"] == start
        assert all(torch.equal(w, loaded["weights"][name]) for name, w in saved["weights"].items())


def _start(rank, args):
    try:
        return TrainWorker(args).start()
    except ValueError as error:
        return str(error)


def test_moments_of_another_optimizer_are_refused(checkpoint, rollouts, tmp_path):
    flags = {**FLAGS, "save": str(tmp_path), "load": str(tmp_path)}
    run_ranks(_run, 1, fsdp_args(checkpoint, **flags, **SGD), {0: rollouts[0]}, 0)
    args = fsdp_args(checkpoint, **flags)
    (answer,) = run_ranks(_start, 1, args)
    assert "made with --optimizer sgd, this run has --optimizer adam" in str(answer)
    assert "(wanted: --optimizer sgd, or --no-load-optim" in str(answer)
    args.no_load_optim = True
    assert run_ranks(_start, 1, args) == [1]


@pytest.mark.parametrize("momenta", [(0.0, 0.9), (0.9, 0.0)])
def test_sgd_may_get_or_lose_its_momentum(checkpoint, rollouts, tmp_path, momenta):
    wrote, resumes = ({"optimizer": "sgd", "sgd_momentum": momentum} for momentum in momenta)
    flags = {**FLAGS, "save": str(tmp_path), "load": str(tmp_path)}
    run_ranks(_run, 1, fsdp_args(checkpoint, **flags, **wrote), {0: rollouts[0]}, 0)
    (resumed,) = run_ranks(_run, 1, fsdp_args(checkpoint, **flags, **resumes), {1: rollouts[1]}, -1)
    assert resumed["start"] == 1


def _weights_at_start(rank, args):
    worker = TrainWorker(args)
    return {"start": worker.start(), "weights": weights_of(worker)}


def test_a_reference_comes_from_a_checkpoint(checkpoint, rollouts, tmp_path):
    flags = {**FLAGS, "save": str(tmp_path)}
    (saved,) = run_ranks(_run, 1, fsdp_args(checkpoint, **flags), {0: rollouts[0]}, 0)
    args = fsdp_args(checkpoint, ref_load=str(tmp_path), use_kl_loss=True, kl_loss_coef=0.1)
    (reference,) = run_ranks(_reference_at_start, 1, args)
    assert all(torch.equal(w, reference[name]) for name, w in saved["weights"].items())


def _reference_at_start(rank, args):
    worker = TrainWorker(args)
    worker.start()
    return dict(worker.backend.versions.get("ref"))


def _save_then_die(rank, args, rollout):
    """Saves iteration 0 and is killed when iteration 1 is written but not published."""
    worker = TrainWorker(args)
    worker.start()
    worker.train_shard(0, split(args, rollout, worker.parallel_config()))
    worker.save_model(0)
    checkpoint_module.publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    worker.save_model(1)
    return {}


def test_a_save_killed_half_way_is_not_chosen(checkpoint, rollouts, tmp_path):
    args = fsdp_args(checkpoint, save=str(tmp_path), load=str(tmp_path), **FLAGS)
    with pytest.raises(RuntimeError, match="died"):
        run_ranks(_save_then_die, 1, args, rollouts[0])
    assert (tmp_path / "iter_0000001.tmp").is_dir()
    assert find_checkpoint(tmp_path) == (0, iteration_dir(tmp_path, 0))
    assert run_ranks(_weights_at_start, 1, args)[0]["start"] == 1


def _first_line(rank, args):
    try:
        TrainWorker(args).start()
    except (RuntimeError, ValueError) as error:
        return cause(error)


class Planted:
    """Makes a file where it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self):
        return open, (str(self.proof), "w")


def test_damaged_foreign_and_planted_checkpoints_are_refused(checkpoint, rollouts, tmp_path):
    args = fsdp_args(checkpoint, save=str(tmp_path), load=str(tmp_path), **FLAGS)
    run_ranks(_run, 1, args, {0: rollouts[0]}, 0)
    directory, proof = tmp_path / "iter_0000000", tmp_path / "proof"

    def refused_with(file, content):
        original = file.read_bytes()
        file.write_bytes(content)
        (line,) = run_ranks(_first_line, 1, args)
        file.write_bytes(original)
        return line

    metadata = json.loads((directory / "metadata.json").read_text())
    foreign = json.dumps({**metadata, "sharded_backend": "torch_dist"}).encode()
    assert "its format is 'torch_dist', wanted 'fsdp_dcp'" in refused_with(
        directory / "metadata.json", foreign
    )
    weights = directory / "model" / "__0_0.distcp"
    assert "could not be read" in refused_with(weights, weights.read_bytes()[:200])
    planted = pickle.dumps(Planted(proof))
    assert "not a checkpoint's metadata" in refused_with(directory / "model" / ".metadata", planted)
    assert "not the random state of a rank" in refused_with(directory / "rng_00000.pt", planted)
    assert not proof.exists()
